"""Random numbers of a replica: drawn from (the generator's state, the replica), whatever device it runs on.

Replica 0 draws what plain Keras draws, so one replica is plain Keras. The others start from a hash of the state and
their number: no two replicas, nor two generators, share a stream.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def is_seed(variable: Any) -> bool:
    """Whether a Keras variable is the state of a SeedGenerator."""
    return variable.name == "seed_generator_state"


def for_replica(state: jax.Array, replica: jax.Array) -> jax.Array:
    """The state from which this replica draws."""
    key = jax.random.wrap_key_data(state.astype(jnp.uint32), impl="threefry2x32")
    other = jax.random.key_data(jax.random.fold_in(key, replica)).astype(state.dtype)
    return jnp.where(replica == 0, state, other)
