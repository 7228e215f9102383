"""The inspection of one step before it is run: what each replica has to compute, for an inspector that a tool brings along."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.processes import names
from unisono._src.replica.protocol import RecordedVariables, State
from unisono._src.step.call_inputs import CallInputs
from unisono._src.step.cut_step import InspectedProgram
from unisono._src.step.phased_steps import PhasedSteps
from unisono._src.step.plan import BatchPlan, ReplicaRun, Shard
from unisono._src.typing import Array, PyTree


class InspectedReplica(NamedTuple):
    """What one replica computes in a step."""

    replica: int
    rows: range
    """Its rows of the global batch; of a batch that is not cut, those of the first array."""
    batch: PyTree
    gradients: list[Array | None]
    """Its parts of the gradients, in the order of the recorded variables; None for a gradient that is no sum of parts."""
    loss: Array | None
    """Its part of the loss: the parts of all replicas add up to the loss. None where the step does not tell it."""


class InspectedStep(NamedTuple):
    """A step before it is run."""

    recorded: RecordedVariables
    state: State
    batch: GlobalBatch
    replicas: Sequence[InspectedReplica]
    """The replicas of this process that have rows."""
    programs: Sequence[InspectedProgram]

    def find_replica(self, row: int) -> int | None:
        """Return the replica of this process that has a row of the global batch."""
        return next((each.replica for each in self.replicas if row in each.rows), None)


class StepInspector(Protocol):
    """An inspector of one step of a training."""

    @property
    def step(self) -> int:
        """Return the number of the step that is inspected."""
        ...

    def inspect(self, step: InspectedStep) -> None:
        """Look at the step. What the inspector keeps must be copied: the step is given the memory of the state."""
        ...


class StepInspection:
    """The inspection of a step of one program."""

    def __init__(self, inspector: StepInspector, list_recorded: Callable[[], RecordedVariables], inputs: CallInputs) -> None:
        self._inspector = inspector
        self._list_recorded = list_recorded
        self._inputs = inputs

    def count_uninspected(self, step: int) -> int:
        """Return how many steps from this one on are not inspected."""
        before = self._inspector.step - step
        return before if before >= 0 else sys.maxsize

    def inspect(self, batch: GlobalBatch, batch_plan: BatchPlan, state: State, cutter: PhasedSteps) -> None:
        """Hand a step to the inspector."""
        shards = [
            Shard(each.replica, each.leaf, range(batch.counted_rows) if batch.is_whole else each.rows)
            for each in batch_plan.shards
        ]
        batches = [
            self._inputs.read_replica(batch, ReplicaRun(len(each.rows), each.replica, 0, 1, each.rows))
            for each in batch_plan.shards
        ]
        parts, programs = cutter.inspect(batch, batch_plan, state, batches)
        replicas = [
            InspectedReplica(shard.replica, shard.rows, rows, *part)
            for shard, rows, part in zip(shards, batches, parts, strict=True)
        ]
        self._inspector.inspect(InspectedStep(self._list_recorded(), state, batch, replicas, programs))


def open_inspection(list_recorded: Callable[[], RecordedVariables], inputs: CallInputs) -> StepInspection | None:
    """Return the inspection by the inspector that the environment names; None where it names none."""
    module = os.environ.get(names.INSPECTOR)
    return StepInspection(importlib.import_module(module).make_inspector(), list_recorded, inputs) if module else None
