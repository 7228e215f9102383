"""The last stage of a step in the step program, where steps are recorded: the digests of what the step has written."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from unisono._src.packing import unpack_tree
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.protocol import ReplicaComputation, State
from unisono._src.step import running_sums, step_digests
from unisono._src.step.step_digests import DigestedPart, StepDigests
from unisono._src.typed_jax import fori_loop
from unisono._src.typing import Array, PyTree


class DigestStage:
    """The stage of one program. Its digests are a list of one item, or of none where steps are not recorded."""

    def __init__(self, functions: ReplicaComputation, replicas: int, is_recorded: bool) -> None:
        self._functions = functions
        self._replicas = replicas
        self._is_recorded = is_recorded

    def make_room(self, state: State, like: Contribution, batches: PyTree) -> list[StepDigests]:
        """Return room for the digests of the steps of a call; `like` is a contribution, in shapes."""
        if not self._is_recorded:
            return []
        steps = max(1, len(jax.tree.leaves(batches)[0]) // self._replicas)
        return [step_digests.make_room(steps, len(like.gradients) + len(list_state_parts(state)))]

    def put_sums(
        self,
        digests: list[StepDigests],
        number: Array,
        is_finished: int | Array,
        sums: running_sums.Sums,
        state: State,
        like: Contribution,
    ) -> list[StepDigests]:
        """Put the digests of a step whose total lies at the first place of the running sums."""
        if not digests:
            return []
        gradients = step_digests.list_first_parts(sums, like.gradients)
        total = unpack_tree(running_sums.get_place(sums), like)
        return self._put(digests, number, is_finished, gradients, state, self._functions.read_loss(total, total))

    def put_total(
        self, digests: list[StepDigests], number: Array, is_finished: int | Array, total: Contribution, state: State
    ) -> list[StepDigests]:
        """Put the digests of a step of one replica, whose contribution is the total."""
        gradients = list(map(step_digests.take_whole, total.gradients))
        return self._put(digests, number, is_finished, gradients, state, self._functions.read_loss(total, total))

    def _put(
        self,
        digests: list[StepDigests],
        number: Array,
        is_finished: int | Array,
        gradients: Sequence[DigestedPart],
        state: State,
        loss: Array,
    ) -> list[StepDigests]:
        """Put the digests of a step that was finished. The loop keeps them apart: they must not change how the step is computed."""
        parts = [*gradients, *list_state_parts(state)]

        def put(_: Array, digests: StepDigests) -> StepDigests:
            return step_digests.put_step(digests, number, parts, loss)

        return [fori_loop(0, is_finished, put, one) for one in digests]


def list_state_parts(state: State) -> list[DigestedPart]:
    """Return the arrays of the state that are recorded: all but those of metrics, the last group."""
    return [step_digests.take_whole(array) for group in state[:-1] for array in group]


def digest_state(state: State) -> Array:
    """Return the digests of the arrays of the state that are recorded."""
    return step_digests.digest_parts(list_state_parts(state))
