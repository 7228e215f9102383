"""The digests of steps, inside the step program.

There are digests of the gradient, the weights and the optimizer's state, by variable. They are computed from arrays that the step
has already written, so that they change no bit of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from unisono._src.engine.cut_arrays import read_digest
from unisono._src.engine.digest import LANES, digest_in_program
from unisono._src.engine.state import UNTOLD_LOSS, State
from unisono._src.engine.step import step_digests
from unisono._src.engine.step.traced_step import StepEnd
from unisono._src.kernels.before_gradient import uses_kernels
from unisono._src.kernels.native.step_calls import call_digest
from unisono._src.typed_jax import fori_loop, update_index
from unisono._src.typing import Array, PyTree


class StepDigests(NamedTuple):
    """The digests and losses of a call, one row a step."""

    digests: Array
    """(step, array, lane)"""
    losses: Array


def make_room(steps: int, parts: int) -> StepDigests:
    """Make digests of steps, all zero."""
    return StepDigests(jnp.zeros((steps, parts, LANES), jnp.uint32), jnp.zeros(steps, jnp.float32))


def put_step(
    digests: StepDigests, number: Array, arrays: Sequence[Array], loss: Array, cut_places: frozenset[int] = frozenset()
) -> StepDigests:
    """Write the digests of one more step."""
    number_of_loss = loss.astype(jnp.float32).reshape(()) if loss.size == 1 else jnp.asarray(UNTOLD_LOSS)
    return StepDigests(
        update_index(digests.digests, digest_arrays(arrays, cut_places), number, 0),
        update_index(digests.losses, number_of_loss, number, 0),
    )


def digest_arrays(arrays: Sequence[Array], cut_places: frozenset[int] = frozenset()) -> Array:
    """Compute the digests (array, lane) of arrays. Those of arrays that lie cut are known."""
    if cut_places:
        rows = iter(digest_arrays([array for place, array in enumerate(arrays) if place not in cut_places]))
        return jnp.stack([read_digest(array) if place in cut_places else next(rows) for place, array in enumerate(arrays)])
    if not uses_kernels():
        return jnp.stack([digest_in_program(array.ravel()) for array in arrays])
    distinct = {id(array): array for array in arrays}
    places = {identity: place for place, identity in enumerate(distinct)}
    return call_digest(list(distinct.values()), [(places[id(array)], 0, array.size) for array in arrays])


class DigestStage:
    """The stage of one program. Its digests are a list of one item, or of none where steps are not recorded."""

    def __init__(self, replicas: int, is_recorded: bool, cut_places: frozenset[int]) -> None:
        self._replicas = replicas
        self._cut_places = cut_places
        self.is_on = is_recorded

    def make_room(self, like: StepEnd, batches: PyTree) -> list[StepDigests]:
        """Make room for the digests of a call. `like` is the end of a step, in shapes."""
        if not self.is_on:
            return []
        steps = max(1, len(jax.tree.leaves(batches)[0]) // self._replicas)
        return [step_digests.make_room(steps, len(like.gradients) + len(list_state_arrays(like.state)))]

    def put(self, digests: list[StepDigests], number: Array, is_finished: int | Array, end: StepEnd) -> list[StepDigests]:
        """Write the digests of a step that was finished.

        A loop keeps them apart: they must not change how the step is computed.
        """
        arrays = [*end.gradients, *list_state_arrays(end.state)]
        cut_places = frozenset(len(end.gradients) + place for place in self._cut_places)

        def put(_: Array, digests: StepDigests) -> StepDigests:
            return step_digests.put_step(digests, number, arrays, end.loss, cut_places)

        return [fori_loop(0, is_finished, put, one) for one in digests]


def list_state_arrays(state: State) -> list[Array]:
    """List the recorded arrays of a state. The last group, of metrics, is left out."""
    return [array for group in state[:-1] for array in group]


def digest_state(state: State, cut_places: frozenset[int] = frozenset()) -> Array:
    """Digest the recorded arrays of a state. At the cut places is what stands for arrays that lie cut."""
    return step_digests.digest_arrays(list_state_arrays(state), cut_places)
