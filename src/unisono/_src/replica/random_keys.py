"""Random numbers of a replica: drawn from (the generator's state, the replica), on any device.

Replica 0 draws what plain Keras draws, so one replica is plain Keras. The others start from a hash of the state and
their number: no two replicas, nor two generators, share a stream.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras

from unisono._src.typed_jax import wrap_key_data
from unisono._src.typing import Array


def is_seed_state(variable: keras.Variable) -> bool:
    """Return whether a Keras variable is the state of a SeedGenerator."""
    return variable.name == "seed_generator_state"


def derive_replica_key(state: Array, replica: Array) -> Array:
    """Return the state from which this replica draws."""
    key = wrap_key_data(state.astype(jnp.uint32), impl="threefry2x32")
    other = jax.random.key_data(jax.random.fold_in(key, replica)).astype(state.dtype)
    return jnp.where(replica == 0, state, other)
