"""The inspection of one step before it is run: what each replica has to compute, for an inspector that a tool brings along."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.processes import names
from unisono._src.replica.protocol import ReplicaComputation, State
from unisono._src.step.call_inputs import CallInputs
from unisono._src.step.plan import BatchPlan, ReplicaRun
from unisono._src.step.summed_step import SummedSteps
from unisono._src.typing import PyTree


class ReplicaCall(NamedTuple):
    """The call of `ReplicaComputation.contribution` for one replica."""

    replica: int
    rows: range
    """Its rows of the global batch; of a batch that is not cut, those of the first array."""
    batch: PyTree
    args: tuple[PyTree, ...]
    """All arguments, the state and the batch among them."""


class InspectedStep(NamedTuple):
    """A step before it is run."""

    functions: ReplicaComputation
    state: State
    batch: GlobalBatch
    calls: Sequence[ReplicaCall]
    """The replicas of this process that have rows."""


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

    def __init__(self, inspector: StepInspector, functions: ReplicaComputation, inputs: CallInputs, steps: SummedSteps) -> None:
        self._inspector = inspector
        self._functions = functions
        self._inputs = inputs
        self._steps = steps

    def count_uninspected(self, step: int) -> int:
        """Return how many steps from this one on are not inspected."""
        before = self._inspector.step - step
        return before if before >= 0 else sys.maxsize

    def inspect(self, batch: GlobalBatch, batch_plan: BatchPlan, state: State) -> None:
        """Hand a step to the inspector. Divisors that shapes do not decide are counted here."""
        divisors = np.array(self._steps.list_numbers(batch, batch_plan, 1, state)[2:], np.float32)
        calls = self._list_calls(batch, batch_plan, state, divisors)
        if self._steps.cut(batch, batch_plan, state).phases > 1:
            calls = self._list_calls(batch, batch_plan, state, self._count_divisors(calls))
        self._inspector.inspect(InspectedStep(self._functions, state, batch, calls))

    def _list_calls(self, batch: GlobalBatch, batch_plan: BatchPlan, state: State, divisors: np.ndarray) -> list[ReplicaCall]:
        calls: list[ReplicaCall] = []
        for shard in batch_plan.shards:
            rows = self._inputs.read_replica(batch, ReplicaRun(len(shard.rows), shard.replica, 0, 1, shard.rows))
            row_fraction = np.float32(len(shard.rows) / batch.rows)
            args = state, rows, np.int32(shard.replica), row_fraction, divisors, self._inputs.constants()
            counted = range(batch.counted_rows) if batch.is_whole else shard.rows
            calls.append(ReplicaCall(shard.replica, counted, rows, args))
        return calls

    def _count_divisors(self, calls: Sequence[ReplicaCall]) -> np.ndarray:
        """Return the divisors of the global batch, as they are counted on the rows."""
        counted: list[np.ndarray] = []
        for call in calls:
            state, rows, replica, row_fraction, _, constants = call.args
            terms = self._functions.divisors(state, rows, replica, row_fraction, constants)
            counted.append(np.array([0 if term is None else jnp.asarray(term) for term in terms], np.float32))
        return np.stack(counted).sum(axis=0, dtype=np.float32)


def open_inspection(functions: ReplicaComputation, inputs: CallInputs, steps: SummedSteps) -> StepInspection | None:
    """Return the inspection by the inspector that the environment names; None where it names none."""
    module = os.environ.get(names.INSPECTOR)
    return StepInspection(importlib.import_module(module).make_inspector(), functions, inputs, steps) if module else None
