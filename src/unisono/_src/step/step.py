"""The step of fit, evaluate and `run`: takes state and global batches, and returns the new state, logs and outputs of replicas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

from unisono._src.data.global_batch import GlobalBatch, want_row_digests
from unisono._src.device_mesh import get_mesh
from unisono._src.exchange.protocol import Exchange
from unisono._src.placement import Placement
from unisono._src.replica.protocol import State
from unisono._src.step.call_inputs import CallInputs
from unisono._src.step.call_orders import CallOrders
from unisono._src.step.device_state import DeviceState
from unisono._src.step.parted_steps import CallOutcome, PartedSteps
from unisono._src.step.phased_steps import PhasedSteps
from unisono._src.step.plan import BatchPlan, Round, plan_batch
from unisono._src.step.program_calls import ProgramCalls
from unisono._src.step.recorder import StepRecorder
from unisono._src.step.run_outputs import CarriedValue, DescribeOutputs, RunOutput
from unisono._src.step.step_inspection import open_inspection
from unisono._src.step.step_start import StepStart
from unisono._src.step.traced_step import StepFunction
from unisono._src.step.verification import Verification, VerifiedReplica
from unisono._src.step_count import get_step_count
from unisono._src.typing import AnyArray, Logs

MOST_STEPS = 64

NO_OUTCOME = CallOutcome({}, [], [])
"""Before the first step of a call."""


class Step:
    """Steps of a placement's replicas, whatever they compute.

    One device that runs all replicas, of equal size, takes several steps in one call. Other steps are made of several calls.
    """

    def __init__(
        self,
        name: str,
        function: StepFunction,
        placement: Placement,
        exchange: Exchange,
        most_steps: int = MOST_STEPS,
        recorder: StepRecorder | None = None,
        verification: Verification | None = None,
        fixed_digest: int = 0,
    ) -> None:
        """`name` is what profiles call the program. A call may take `most_steps`, and has room for the batches of all of them.

        `recorder` is told of the steps that train, and `verification` chooses those that are verified. `fixed_digest` is of numbers that are
        the same for all replicas and part of the program.
        """
        self._verification = verification
        self._recorder = recorder
        self._function = function
        self._plans = functools.cache(functools.partial(plan_batch, placement=placement))
        self._inputs = CallInputs(placement, most_steps)
        self._cutter = PhasedSteps(function, self._inputs, placement)
        self._mesh = get_mesh(placement.devices)
        self._device_state = DeviceState(placement)
        self._has_state = False
        self._start = StepStart(placement, self._device_state, recorder, fixed_digest)
        self._inspection = None if recorder is None else open_inspection(function.list_recorded, self._inputs)
        self._call = ProgramCalls(name, self._cutter, placement, self._inputs, self._device_state, self._is_recorded)
        self._parted = PartedSteps(placement, exchange, self._device_state, self._call, self._start, verification, self._note_end)
        self._newest = NO_OUTCOME

    def __call__(self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = ()) -> tuple[Logs, State]:
        """Return the logs after the last of the batches, and the state."""
        return self.outputs(state, batches, constants)[0], self.state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = (), carried: Sequence[CarriedValue] = ()
    ) -> tuple[Logs, list[RunOutput]]:
        """Return the logs and the replicas' outputs of the last of the batches; the new state is then `self.state`.

        Replicas get a batch's rows, or (rows, values) where values of an earlier step are carried over.
        """
        self._newest = NO_OUTCOME
        self._has_state = False
        if self._is_recorded:
            want_row_digests(batches)
        self._inputs.keep(constants, carried)
        self._start.receive_constants(constants)
        while batches:
            verified = self._choose_verified(batches[0])
            count = 1 if verified else self._count_steps(len(batches))
            now = batches[:count]
            batches = batches[count:]
            self._start.receive_state(state)
            self._has_state = True
            self._inspect(now[0])
            try:
                groups = list(self._group_batches(now))
                for group, following in itertools.zip_longest(groups, groups[1:]):
                    self._run_group(group, following, verified)
            finally:
                self._parted.end()
            if batches:
                state = self.state
        return self._newest.logs, self._newest.outputs

    def _run_group(self, group: list[GlobalBatch], following: list[GlobalBatch] | None, verified: VerifiedReplica | None) -> None:
        """Run the steps of a group, which another may follow."""
        batch_plan = self._plan_of(group[0])
        whole = None if verified else batch_plan.whole
        if whole is None:
            send_next = functools.partial(self._send_ahead, following) if following else None
            self._parted.run(group[0], batch_plan, verified, send_next)
        else:
            self._parted.end()
            self._note_end(group, self._run_together(group, batch_plan, whole))

    def _send_ahead(self, group: list[GlobalBatch]) -> None:
        """Send the first rows of a step to the devices, before it asks for them."""
        batch_plan = self._plan_of(group[0])
        if batch_plan.whole is None and batch_plan.first_round is not None:  # several whole steps are sent together
            self._inputs.send_batches(group[:1], batch_plan.first_round)

    def _note_end(self, group: list[GlobalBatch], outcome: CallOutcome) -> None:
        """Note steps that are finished."""
        self._newest = outcome
        if self._recorder is not None:
            self._recorder.note_steps(group, outcome.digests)
        if outcome.fault is not None:
            raise outcome.fault

    @property
    def _is_recorded(self) -> bool:
        """Return whether digests of the steps are wanted."""
        return self._recorder is not None and self._recorder.is_on

    def _count_steps(self, most: int) -> int:
        """Return how many of the next steps may be taken until one is verified or inspected, up to this number."""
        count = most
        step = get_step_count().steps
        if self._verification is not None:
            count = min(count, self._verification.count_unverified(step))
        if self._inspection is not None:
            count = min(count, self._inspection.count_uninspected(step))
        return max(1, count)

    def _choose_verified(self, batch: GlobalBatch) -> VerifiedReplica | None:
        """Return the replica that the next step verifies; None where it verifies none."""
        if self._verification is None:
            return None
        return self._verification.choose(get_step_count().steps, self._plan_of(batch))

    def _inspect(self, batch: GlobalBatch) -> None:
        """Have the next step inspected, if it is the one that is asked for."""
        if self._inspection is not None and not self._inspection.count_uninspected(get_step_count().steps):
            self._inspection.inspect(batch, self._plan_of(batch), self._device_state.lead_state, self._cutter)

    @property
    def state(self) -> State:
        """Return the newest state, on the lead device; empty where the last call stopped before it took the state that it was given."""
        return self._device_state.give_state() if self._has_state else ()

    def describe_outputs(self, batch: GlobalBatch) -> DescribeOutputs:
        """Return what describes the outputs of a replica of the last step, which was of this batch, by the number of its rows."""
        return self._cutter.cut(batch, self._plan_of(batch), self._device_state.shapes).describe_outputs

    @property
    def has_own_logs(self) -> bool:
        """Return whether logs are others than the results of the metrics; known after the first call."""
        return self._function.has_own_logs

    def forget(self) -> None:
        """Drop what lies on the devices; the next step sends it again."""
        self._device_state.forget()
        self._inputs.forget()
        self._parted.forget()
        self._has_state = False

    def _plan_of(self, batch: GlobalBatch) -> BatchPlan:
        return self._plans(batch.rows, batch.sizes)

    def _group_batches(self, batches: list[GlobalBatch]) -> Iterator[list[GlobalBatch]]:
        """Yield lists of batches that one call can take."""
        for _, same in itertools.groupby(batches, key=lambda batch: (batch.rows, batch.sizes, batch.signature)):
            same = list(same)
            whole = self._plan_of(same[0]).whole
            most = self._inputs.count_steps(same[0], whole.size) if whole else 1
            for start in range(0, len(same), most):
                yield same[start : start + most]

    def _run_together(self, group: list[GlobalBatch], batch_plan: BatchPlan, whole: Round) -> CallOutcome:
        """Run whole steps in one call, on one device."""
        phases = self._call.prepare(group[0], batch_plan)
        (run,) = whole.runs
        assert run is not None
        orders = CallOrders(len(group), first=run.first, replicas=run.count, end=phases, summing=1, finishing=1)
        done = self._call(group, whole, ((orders,),))
        return CallOutcome(done.logs, [RunOutput(self._mesh, whole.runs, done.outputs)], done.digests)
