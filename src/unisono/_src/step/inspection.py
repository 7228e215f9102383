"""The inspection of one step before it is run: what each replica has to compute, for an inspector that a tool brings along."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.placement import Placement
from unisono._src.replica.protocol import ReplicaComputation, State
from unisono._src.step.call_inputs import CallInputs
from unisono._src.step.loss_divisors import BatchDivisors
from unisono._src.step.plan import BatchPlan, ReplicaRun
from unisono._src.typing import PyTree

SWITCH = "UNISONO_INSPECTOR"
"""The environment variable that names a module whose `make_inspector()` returns the inspector of this process."""


class ReplicaCall(NamedTuple):
    """The call of `ReplicaComputation.contribution` for one replica."""

    replica: int
    rows: range
    """Its rows of the global batch."""
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
    """An inspector of steps."""

    @property
    def step(self) -> int:
        """Return the number of the step that is inspected."""
        ...

    def inspect(self, step: InspectedStep) -> None:
        """Look at the step. What it keeps must be copied: the step is given the memory of the state."""
        ...


class StepInspection:
    """The inspection of the steps of one program."""

    def __init__(self, functions: ReplicaComputation, placement: Placement, inputs: CallInputs) -> None:
        self._functions = functions
        self._placement = placement
        self._inputs = inputs
        name = os.environ.get(SWITCH)
        self._inspector: StepInspector | None = importlib.import_module(name).make_inspector() if name else None

    def is_due(self, step: int) -> bool:
        return self._inspector is not None and self._inspector.step == step

    def limit_count(self, step: int, count: int) -> int:
        """Return how many of the next steps may be taken in one call, so that the step that is inspected is by itself."""
        if self._inspector is None or not 0 <= self._inspector.step - step < count:
            return count
        return max(1, self._inspector.step - step)

    def inspect(self, batch: GlobalBatch, plan: BatchPlan, state: State, divisors: BatchDivisors) -> None:
        """Hand a step to the inspector. `divisors` are those that shapes decide; the others are counted here."""
        assert self._inspector is not None
        known = np.asarray(divisors.on_devices[0])
        calls = self._list_calls(batch, plan, state, known)
        if divisors.are_counted:
            calls = self._list_calls(batch, plan, state, self._count_divisors(calls))
        self._inspector.inspect(InspectedStep(self._functions, state, batch, calls))

    def _list_calls(self, batch: GlobalBatch, plan: BatchPlan, state: State, divisors: np.ndarray) -> list[ReplicaCall]:
        calls: list[ReplicaCall] = []
        for shard in plan.shards:
            run = ReplicaRun(len(shard.rows), shard.replica, 0, 1, shard.rows)
            rows = self._inputs.read_replica(batch, run)
            fraction = np.float32(len(shard.rows) / batch.rows)
            args = state, rows, np.int32(shard.replica), fraction, divisors, self._inputs.constants()
            calls.append(ReplicaCall(shard.replica, shard.rows, rows, args))
        return calls

    def _count_divisors(self, calls: Sequence[ReplicaCall]) -> np.ndarray:
        """Return the divisors of the global batch, as they are counted on the rows."""
        total = np.zeros(0, np.float32)
        for call in calls:
            state, rows, replica, fraction, _, constants = call.args
            terms = self._functions.divisors(state, rows, replica, fraction, constants)
            counted = np.array([0 if term is None else jnp.sum(jnp.asarray(term)) for term in terms], np.float32)
            total = counted if not total.size else total + counted
        return total
