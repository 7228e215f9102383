"""The digests of steps, inside the step program: of the gradient, the weights and the optimizer's state, by variable.

They are computed from arrays that the step has already written, so that they change no bit of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from unisono._src.digest import LANES, digest_in_program
from unisono._src.native.digests import call_digest
from unisono._src.replica.untold_loss import UNTOLD_LOSS
from unisono._src.typed_jax import update_index
from unisono._src.typing import Array
from unisono._src.xla.rewrite import uses_kernels


class StepDigests(NamedTuple):
    """The digests and the losses of the steps of a call: a row for each step."""

    digests: Array
    """(step, array, lane)"""
    losses: Array


def make_room(steps: int, parts: int) -> StepDigests:
    """Return digests of steps, all zero."""
    return StepDigests(jnp.zeros((steps, parts, LANES), jnp.uint32), jnp.zeros(steps, jnp.float32))


def put_step(digests: StepDigests, number: Array, arrays: Sequence[Array], loss: Array) -> StepDigests:
    """Return the digests with those of one more step."""
    number_of_loss = loss.astype(jnp.float32).reshape(()) if loss.size == 1 else jnp.asarray(UNTOLD_LOSS)
    return StepDigests(
        update_index(digests.digests, digest_arrays(arrays), number, 0), update_index(digests.losses, number_of_loss, number, 0)
    )


def digest_arrays(arrays: Sequence[Array]) -> Array:
    """Return the digests (array, lane)."""
    if not uses_kernels():
        return jnp.stack([digest_in_program(array.ravel()) for array in arrays])
    distinct = {id(array): array for array in arrays}
    places = {identity: place for place, identity in enumerate(distinct)}
    return call_digest(list(distinct.values()), [(places[id(array)], 0, array.size) for array in arrays])
