"""The protocol between the step program and a step that is cut into shards: phases of the shards, what is computed between them, the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple, Protocol, TypeAlias

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.phases.run import ShardPlace
from unisono._src.replica.protocol import State
from unisono._src.step.plan import BatchPlan
from unisono._src.typing import Array, Logs, PyTree

Sums: TypeAlias = list[list[Array]]
"""For each phase what all shards have added up."""


class ShardWork(NamedTuple):
    """The results of one shard in one phase."""

    added: list[Array]
    """Added up over all shards."""
    outputs: list[Array]
    """Left on the shard's device."""
    kept: list[Array]
    """Read by the same shard in a later phase."""


class StepEnd(NamedTuple):
    """The results of a step."""

    state: State
    logs: Logs
    gradients: list[Array]
    """The gradients as the optimizer takes them, where they are told."""
    loss: Array
    """`UNTOLD_LOSS` where the step does not tell it."""
    disagree: list[Array]
    """For each counter whether replicas disagree on it."""


class Known(NamedTuple):
    """The values that are the same for all shards."""

    state: State
    """The state before the step."""
    totals: Sums
    """Those of the phases so far."""
    made: list[list[Array]]
    """For each phase so far what was computed before it."""
    numbers: Array
    """Those of `StepCutter.list_numbers`."""
    constants: Sequence[Array]


class CutStep(Protocol):
    """A step on batches of one kind. All functions but `describe` are traced."""

    phases: int

    def describe(self, phase: int, known: Known, batch: PyTree) -> ShardWork:
        """Return the results of a shard in a phase, in shapes."""
        ...

    def prepare(self, phase: int, known: Known) -> list[Array]:
        """Return what is computed once before a phase."""
        ...

    def run_shard(
        self, phase: int, known: Known, batch: PyTree, kept: Sequence[list[Array]], place: ShardPlace, replica: Array
    ) -> ShardWork:
        """Return the results of a shard in a phase.

        Args:
            phase: The number of the phase.
            known: What is the same for all shards.
            batch: The shard's rows.
            kept: What the shard has kept, in each phase so far.
            place: The shard's place in the batch.
            replica: The number of its replica.
        """
        ...

    def finish(self, known: Known, present: Array) -> StepEnd:
        """Return the results of the step, from the totals of all phases. `present` is how many replicas have rows."""
        ...


class AloneStep(Protocol):
    """A step of one replica, on batches of one kind. It adds nothing."""

    phases: int

    def run_alone(self, known: Known, batch: PyTree) -> tuple[StepEnd, list[Array]]:
        """Return (the results, the outputs) of a step of one replica, which adds nothing."""
        ...


class InspectedProgram(NamedTuple):
    """A program that computes the step, or a replica's part of it, with its arguments: the state and the batch come first."""

    function: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    batch: PyTree
    rows: range
    """The rows of the global batch that the batch has."""


Part: TypeAlias = tuple[list[Array | None], Array | None]
"""A replica's parts of the gradients, and of the loss; None for what is no sum of parts."""


class StepCutter(Protocol):
    """Cuts a step for batches: by their shapes, and by the rows of the replicas."""

    def cut(self, batch: GlobalBatch, batch_plan: BatchPlan, state: State) -> CutStep | AloneStep:
        """Return the step for a batch: the same object for batches of one kind."""
        ...

    def list_numbers(self, batch: GlobalBatch, batch_plan: BatchPlan, size: int, state: State) -> tuple[float, ...]:
        """Return the numbers that a program for shards of `size` rows reads."""
        ...

    def list_read(self, state: State) -> Set[tuple[int, int]]:
        """Return the arrays of the state that shards read, by group and place in it."""
        ...

    def check(self, batch: GlobalBatch, size: int, state: State) -> None:
        """Look at a step before it is made for the first time."""
        ...

    def inspect(
        self, batch: GlobalBatch, batch_plan: BatchPlan, state: State, batches: Sequence[PyTree]
    ) -> tuple[list[Part], list[InspectedProgram]]:
        """Return what each shard of this process gives, and programs that compute the step. `batches` are the rows of the shards."""
        ...
