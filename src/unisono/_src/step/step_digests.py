"""The digests of steps, inside the step program: of the gradient, the weights and the optimizer's state, by variable.

They are computed from arrays that the step has already written, so that they change no bit of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from unisono._src.digest import LANES, digest_in_program
from unisono._src.native.digests import call_digest
from unisono._src.replica.untold_loss import UNTOLD_LOSS
from unisono._src.step.running_sums import Sums
from unisono._src.typed_jax import update_index
from unisono._src.typing import Array
from unisono._src.xla.rewrite import uses_kernels


class StepDigests(NamedTuple):
    """The digests and the losses of the steps of a call: a row for each step."""

    digests: Array
    """(step, array, lane)"""
    losses: Array


class DigestedPart(NamedTuple):
    """Elements of an array that follow one another."""

    array: Array
    first: int
    size: int


def make_room(steps: int, parts: int) -> StepDigests:
    """Return digests of steps, all zero."""
    return StepDigests(jnp.zeros((steps, parts, LANES), jnp.uint32), jnp.zeros(steps, jnp.float32))


def take_whole(array: Array) -> DigestedPart:
    """Return all elements of an array."""
    return DigestedPart(array, 0, array.size)


def list_first_parts(sums: Sums, like: Sequence[Array]) -> list[DigestedPart]:
    """Return the parts of the first place of running sums that are the first arrays of what was packed, which have these shapes."""
    offsets = dict.fromkeys(sums, 0)
    parts: list[DigestedPart] = []
    for leaf in like:
        name = str(leaf.dtype)
        size = math.prod(leaf.shape)
        parts.append(DigestedPart(sums[name], offsets[name], size))
        offsets[name] += size
    return parts


def put_step(digests: StepDigests, number: Array, parts: Sequence[DigestedPart], loss: Array) -> StepDigests:
    """Return the digests with those of one more step."""
    number_of_loss = loss.astype(jnp.float32).reshape(()) if loss.size == 1 else jnp.asarray(UNTOLD_LOSS)
    return StepDigests(
        update_index(digests.digests, digest_parts(parts), number, 0), update_index(digests.losses, number_of_loss, number, 0)
    )


def digest_parts(parts: Sequence[DigestedPart]) -> Array:
    """Return the digests (part, lane)."""
    if not uses_kernels():
        return jnp.stack([digest_in_program(part.array.ravel()[part.first : part.first + part.size]) for part in parts])
    arrays = {id(part.array): part.array for part in parts}
    places = {identity: place for place, identity in enumerate(arrays)}
    return call_digest(list(arrays.values()), [(places[id(part.array)], part.first, part.size) for part in parts])
