"""What each replica computes in a step, for tools. It is read before the step is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.state import RecordedVariables, State
from unisono._src.engine.step.call_inputs import CallInputs
from unisono._src.engine.step.cut_step import InspectedProgram
from unisono._src.engine.step.phased_steps import PhasedSteps
from unisono._src.engine.step.plan import BatchPlan, ReplicaRun, Shard
from unisono._src.typing import Array, PyTree


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
