"""The last stage of a step in the step program, where steps are recorded: the digests of what the step has written."""

from __future__ import annotations

import jax

from unisono._src.replica.protocol import State
from unisono._src.step import step_digests
from unisono._src.step.cut_step import StepEnd
from unisono._src.step.step_digests import StepDigests
from unisono._src.typed_jax import fori_loop
from unisono._src.typing import Array, PyTree


class DigestStage:
    """The stage of one program. Its digests are a list of one item, or of none where steps are not recorded."""

    def __init__(self, replicas: int, is_recorded: bool) -> None:
        self._replicas = replicas
        self.is_on = is_recorded

    def make_room(self, like: StepEnd, batches: PyTree) -> list[StepDigests]:
        """Return room for the digests of the steps of a call; `like` is the end of a step, in shapes."""
        if not self.is_on:
            return []
        steps = max(1, len(jax.tree.leaves(batches)[0]) // self._replicas)
        return [step_digests.make_room(steps, len(like.gradients) + len(list_state_arrays(like.state)))]

    def put(self, digests: list[StepDigests], number: Array, is_finished: int | Array, end: StepEnd) -> list[StepDigests]:
        """Put the digests of a step that was finished. The loop keeps them apart: they must not change how the step is computed."""
        arrays = [*end.gradients, *list_state_arrays(end.state)]

        def put(_: Array, digests: StepDigests) -> StepDigests:
            return step_digests.put_step(digests, number, arrays, end.loss)

        return [fori_loop(0, is_finished, put, one) for one in digests]


def list_state_arrays(state: State) -> list[Array]:
    """Return the arrays of the state that are recorded: all but those of metrics, the last group."""
    return [array for group in state[:-1] for array in group]


def digest_state(state: State) -> Array:
    """Return the digests of the arrays of the state that are recorded."""
    return step_digests.digest_arrays(list_state_arrays(state))
