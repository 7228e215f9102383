"""The state of seed generators.

Replicas that are not compiled begin to draw from states of their own, and so do exported programs in replica code.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import keras

from unisono._src.engine.state import State
from unisono._src.typed_jax import wrap_key_data
from unisono._src.typing import Array


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether a Keras variable is the state of a SeedGenerator."""
    return variable.name == "seed_generator_state"


def start_replica(state: State, others: Sequence[keras.Variable], replica: int) -> State:
    """Make the state from which an uncompiled replica starts. Its random state is its own, except in the first replica."""
    if not replica:
        return state
    own = [derive_key(value, replica) if is_seed_state(each) else value for each, value in zip(others, state[1], strict=True)]
    return (state[0], own, *state[2:])


def derive_key(state: Array, replica: int | Array) -> Array:
    """Derive the state from which this replica draws."""
    key = wrap_key_data(state.astype("uint32"), impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, replica)).astype(state.dtype)
