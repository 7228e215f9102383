"""Observers of a step.

An observer records a step, compares it between processes, verifies it, or looks into it. A step tells its observers what it
starts from, hands them its phases, and tells them when it is finished. It knows nothing of what they do.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from unisono._src.engine.exchange.protocol import Words
from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.state import RecordedVariables, State
from unisono._src.engine.step.call_inputs import CallInputs
from unisono._src.engine.step.device_state import DeviceState
from unisono._src.engine.step.phased_steps import PhasedSteps
from unisono._src.engine.step.plan import BatchPlan, ReplicaRun, Round, Shard
from unisono._src.engine.step.program import CallResult
from unisono._src.engine.step.run_outputs import RunOutput
from unisono._src.engine.step.step_digests import StepDigests
from unisono._src.engine.step.traced_step import InspectedProgram
from unisono._src.typing import AnyArray, Array, PyTree


class InspectedReplica(NamedTuple):
    """What one replica computes in a step."""

    replica: int
    rows: range
    """Its rows of the global batch. If the batch is not cut, these are the rows of the first array."""
    batch: PyTree
    gradients: list[Array | None]
    """Its parts of the gradients, in the order of the recorded variables; None for a gradient that is no sum of parts."""
    loss: Array | None
    """Its part of the loss: the parts of all replicas add up to the loss. None if the step does not report it."""


class InspectedStep(NamedTuple):
    """A step before it is run."""

    recorded: RecordedVariables
    state: State
    """A reader that keeps it must copy it: its memory is donated to the step."""
    batch: GlobalBatch
    replicas: Sequence[InspectedReplica]
    """The replicas of this process that have rows."""
    programs: Sequence[InspectedProgram]

    def find_replica(self, row: int) -> int | None:
        """Find the replica of this process with a row of the batch."""
        return next((each.replica for each in self.replicas if row in each.rows), None)


def inspect_step(
    recorded: RecordedVariables, state: State, batch: GlobalBatch, batch_plan: BatchPlan, inputs: CallInputs, cutter: PhasedSteps
) -> InspectedStep:
    """Compute what each replica of this process computes in a step."""
    shards = [
        Shard(each.replica, each.leaf, range(batch.counted_rows) if batch.is_whole else each.rows) for each in batch_plan.shards
    ]
    batches = [
        inputs.read_replica(batch, ReplicaRun(len(each.rows), each.replica, 0, 1, each.rows)) for each in batch_plan.shards
    ]
    parts, programs = cutter.inspect(batch, batch_plan, state, batches)
    replicas = [
        InspectedReplica(shard.replica, shard.rows, rows, *part) for shard, rows, part in zip(shards, batches, parts, strict=True)
    ]
    return InspectedStep(recorded, state, batch, replicas, programs)


class StartState(NamedTuple):
    """The state that a call of the step starts from."""

    is_other: bool
    """Whether it is another one than the last step has made."""
    assigned: list[tuple[int, Array]] | None
    """Numbered arrays that were assigned since the last step, if an observer wants them. None if the last step's arrays are gone."""
    read: Callable[[], State]
    """Reads the state on the lead. What is kept of it must be copied."""
    digest: Callable[[], Array]
    """Computes the digests of the state."""


class WatchedStep(NamedTuple):
    """A step that an observer sees by itself."""

    number: int
    batch_plan: BatchPlan
    inspect: Callable[[], InspectedStep]
    """Computes what each replica computes in it."""


class LoneReplica(Protocol):
    """A replica that is run apart from those beside it."""

    @property
    def replica(self) -> int:
        """The number of the replica."""
        ...

    def runs(self, round_: Round) -> bool:
        """Whether a call runs the replica."""
        ...

    def run(self, round_: Round) -> CallResult:
        """Run the replica in place of the call. Its contribution is added to the sums of its device."""
        ...


RunPhase: TypeAlias = Callable[[LoneReplica | None], list[RunOutput]]
"""Runs the replicas of a phase, and adds up what they hand on; returns their outputs."""


class WatchedPhase(NamedTuple):
    """A phase of a watched step."""

    number: int
    phases: int
    """How many phases the step has."""
    device_state: DeviceState
    call_alone: Callable[[int, int], CallResult]
    """Runs a replica by itself on a device, into the sums there."""


class StepObserver:
    """An observer of the steps of one program. This one does nothing."""

    wants_assigned = False
    """Whether it asks for arrays that no step has made."""
    runs_phases = False
    """Whether it runs the phases of watched steps. One observer may do so."""

    @property
    def wants_digests(self) -> bool:
        """Whether the observer needs the digests of steps. Programs are compiled for it."""
        return False

    def count_unwatched(self, step: int) -> int:
        """Count the next steps that need not be watched one by one."""
        return sys.maxsize

    def begin(self, batches: Sequence[GlobalBatch], constants: Sequence[AnyArray]) -> None:
        """Take note of a call that begins. `constants` are the same for all replicas and steps."""

    def take_state(self, state: StartState) -> None:
        """Take note of the state that steps start from. What is kept must be copied."""

    def before_rows(self, step: WatchedStep) -> None:
        """Take note of a watched step before it reads rows."""

    def run_phase(self, phase: WatchedPhase, run: RunPhase) -> list[RunOutput]:
        """Run a phase of a watched step."""
        return run(None)

    def list_words(self, batch: GlobalBatch, digest_program: Callable[[], int]) -> list[Words]:
        """List the integers that processes exchange with a phase's all-reduce.

        `digest_program` digests the program that finishes the step.
        """
        return []

    def after_phases(self) -> None:
        """Raise an error where the step must not be finished."""

    def after_steps(self, batches: Sequence[GlobalBatch], digests: Sequence[StepDigests]) -> None:
        """Take note of finished steps, one for each batch. `digests` has one item if digests are wanted."""

    def forget(self) -> None:
        """Drop what lies on the devices."""


def join_words(
    observers: Sequence[StepObserver], batch: GlobalBatch, digest_program: Callable[[], int] = lambda: 0
) -> JoinedWords:
    """Join the integers of all observers, for a phase's all-reduce. Steps that are not compiled have no program."""
    return JoinedWords(words for one in observers for words in one.list_words(batch, digest_program))


class JoinedWords:
    """The integers of several observers, one after another."""

    def __init__(self, parts: Iterable[Words]) -> None:
        self._parts = list(parts)
        self._counts: list[int] = []

    def collect(self) -> tuple[int, ...]:
        """Collect the integers of this process."""
        words = [part.collect() for part in self._parts]
        self._counts = list(map(len, words))
        return tuple(itertools.chain.from_iterable(words))

    def receive(self, words: np.ndarray) -> None:
        """Hand the integers of all processes to the observers that sent them."""
        ends = itertools.accumulate(self._counts)
        for part, count, end in zip(self._parts, self._counts, ends, strict=True):
            part.receive(words[:, end - count : end])
