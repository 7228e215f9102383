"""The step of fit, evaluate and `run`: takes state and global batches, and returns the new state, logs and outputs of replicas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from unisono._src.data.global_batch import GlobalBatch, want_row_digests
from unisono._src.device_mesh import get_mesh
from unisono._src.exchange.protocol import Exchange, FinishedSums
from unisono._src.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.replica.protocol import State
from unisono._src.step.call_inputs import CallInputs
from unisono._src.step.call_orders import CallOrders
from unisono._src.step.device_state import DeviceState
from unisono._src.step.phased_steps import PhasedCut, PhasedSteps, WholeStep
from unisono._src.step.plan import BatchPlan, Layer, ReplicaRun, Round, Runs, plan_batch
from unisono._src.step.program import CallResult
from unisono._src.step.program_calls import ProgramCalls
from unisono._src.step.recorder import StepRecorder
from unisono._src.step.run_outputs import CarriedValue, DescribeOutputs, RunOutput
from unisono._src.step.single_replica import SingleReplicas
from unisono._src.step.step_digests import StepDigests
from unisono._src.step.step_inspection import open_inspection
from unisono._src.step.step_start import StepStart
from unisono._src.step.totals import describe_sum
from unisono._src.step.traced_step import StepFunction
from unisono._src.step.verification import DeviceFaultError, Verification, VerifiedReplica
from unisono._src.step.verified_step import VerifiedStep
from unisono._src.step_count import get_step_count
from unisono._src.typing import AnyArray, Logs

MOST_STEPS = 64


class RecordedStep(StepFunction, Protocol):
    """A function whose steps are run."""

    has_own_logs: bool
    """Whether logs are others than the results of the metrics; known after a trace."""


class CallOutcome(NamedTuple):
    """The results of the steps of one call, or of one step on several devices."""

    logs: Logs
    outputs: list[RunOutput]
    digests: list[StepDigests]
    fault: DeviceFaultError | None = None
    """To be raised now that the step is finished: a device was found to be at fault."""


class Step:
    """Steps of a placement's replicas, whatever they compute.

    One device that runs all replicas, of equal size, takes several steps in one call. Otherwise a call runs replicas of a phase on all
    devices, the exchange adds up, and a last call ends the step on each device.
    """

    def __init__(
        self,
        name: str,
        function: RecordedStep,
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
        self._placement = placement
        self._plans = functools.cache(functools.partial(plan_batch, placement=placement))
        self._inputs = CallInputs(placement, most_steps)
        self._cutter = PhasedSteps(function, self._inputs, placement)
        self._mesh = get_mesh(placement.devices)
        self._no_runs: Runs = (None,) * self._mesh.size
        self._device_state = DeviceState(placement)
        self._exchange = exchange
        self._has_state = False
        self._single_replicas = SingleReplicas(placement, self._device_state)
        self._start = StepStart(placement, self._device_state, recorder, fixed_digest)
        self._inspection = None if recorder is None else open_inspection(function.list_recorded, self._inputs)
        self._call = ProgramCalls(name, self._cutter, placement, self._inputs, self._device_state, self._is_recorded)

    def __call__(self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = ()) -> tuple[Logs, State]:
        """Return the logs after the last of the batches, and the state."""
        return self.outputs(state, batches, constants)[0], self.state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = (), carried: Sequence[CarriedValue] = ()
    ) -> tuple[Logs, list[RunOutput]]:
        """Return the logs and the replicas' outputs of the last of the batches; the new state is then `self.state`.

        Replicas get a batch's rows, or (rows, values) where values of an earlier step are carried over.
        """
        logs = {}
        outputs = []
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
            for group in self._group_batches(now):
                whole = None if verified else self._plan_of(group[0]).whole
                outcome = self._run_together(group, whole) if whole else self._run_parts(group[0], verified)
                logs, outputs, digests, fault = outcome
                if self._recorder is not None:
                    self._recorder.note_steps(group, digests)
                if fault is not None:
                    raise fault
            if batches:
                state = self.state
        return logs, outputs

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
        self._single_replicas.forget()
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

    def _run_together(self, group: list[GlobalBatch], run: ReplicaRun) -> CallOutcome:
        """Run whole steps in one call, on one device."""
        batch_plan = self._plan_of(group[0])
        cut = self._call.cut(group[0], batch_plan, self._device_state.shapes)
        orders = CallOrders(len(group), run.first, run.count, end=cut.phases, summing=1, finishing=1)
        done = self._call(group, batch_plan, run.size, (run,), [orders])
        return CallOutcome(done.logs, [RunOutput(self._mesh, (run,), done.outputs)], done.digests)

    def _run_parts(self, batch: GlobalBatch, verified: VerifiedReplica | None = None) -> CallOutcome:
        """Run one step: for each phase the replicas and the exchange, then the end of the step on every device."""
        batch_plan = self._plan_of(batch)
        cut = self._call.cut(batch, batch_plan, self._device_state.shapes)
        if self._placement.processes:
            self._start.receive_program(self._call.digest_finishing(batch, batch_plan))
        fault = None
        outputs: list[RunOutput] = []
        verified_phase = None if verified is None else self._choose_phase(verified, cut)
        for phase in range(cut.phases):
            sum_once = functools.partial(self._sum_parts, batch_plan, batch, phase)
            if verified is not None and phase == verified_phase:
                step = self._open_verified(verified, batch_plan, batch, phase)
                (total, outputs), fault = step.sum_rounds(functools.partial(sum_once, verified=step))
            else:
                total, outputs = sum_once()
            if total is not None:
                self._device_state.put_total(phase, total)
        if self._verification is not None:
            self._verification.check_processes()
        done = self._call([batch], batch_plan, batch_plan.size_at_end, self._no_runs, [CallOrders(finishing=1)] * self._mesh.size)
        self._start.note_finished()
        get_activity().report_next_step()
        return CallOutcome(done.logs, outputs, done.digests, fault)

    def _choose_phase(self, verified: VerifiedReplica, cut: PhasedCut | WholeStep) -> int:
        """Return the phase in which a replica is verified: phases take turns after all replicas have had theirs."""
        assert self._verification is not None
        return self._verification.count_turns(verified.step) // self._placement.replicas % cut.phases

    def _sum_parts(
        self, batch_plan: BatchPlan, batch: GlobalBatch, phase: int, verified: VerifiedStep | None = None
    ) -> tuple[PackedTree | None, list[RunOutput]]:
        """Run the replicas of a phase: return their total, and their outputs. The total is None where one device has it in place."""
        finished: list[FinishedSums] = []
        outputs: list[RunOutput] = []
        layers = batch_plan.layers if verified is None else batch_plan.list_layers(alone=verified.replica)
        for layer in layers:
            for round_ in layer.rounds:
                if verified is not None and verified.runs(round_):
                    done = verified.run_replica(round_)
                else:
                    orders = self._order_round(layer, round_, phase)
                    done = self._call([batch], batch_plan, round_.size, round_.runs, orders)
                outputs.append(RunOutput(self._mesh, round_.runs, done.outputs))
            is_last = layer is layers[-1]
            sums = self._device_state.work.sums[phase] if is_last else self._device_state.take_sums(phase)
            finished.append(FinishedSums(layer.nodes, sums))
        if self._mesh.size == 1 and self._placement.processes is None:
            return None, outputs
        attempt = None if self._verification is None else self._verification.words
        like = self._device_state.describe_sums(phase)
        description = describe_sum(batch_plan, like, batch, self._start.digests, attempt)
        return self._exchange.total(finished, description), outputs

    def _order_round(self, layer: Layer, round_: Round, phase: int) -> list[CallOrders]:
        """Return the orders of each device to run its replicas in a phase."""
        return [
            CallOrders()
            if part is None or run is None
            else CallOrders(
                first=run.first,
                replicas=run.count,
                before=run.before,
                place=part.span.start + run.before,
                row=run.rows.start,
                phase=phase,
                end=phase + 1,
                summing=int(is_last),
            )
            for part, run, is_last in zip(layer.parts, round_.runs, round_.is_last, strict=True)
        ]

    def _open_verified(self, verified: VerifiedReplica, batch_plan: BatchPlan, batch: GlobalBatch, phase: int) -> VerifiedStep:
        """Return the step with what runs the replica that it verifies."""
        assert self._verification is not None
        run = verified.run
        orders = CallOrders(
            first=run.first,
            replicas=1,
            place=batch_plan.replicas.index(run.first),
            row=run.rows.start,
            phase=phase,
            end=phase + 1,
            summing=1,
        )

        def call(index: int) -> CallResult:
            devices = range(self._mesh.size)
            runs = tuple(run if device == index else None for device in devices)
            return self._call([batch], batch_plan, run.size, runs, [orders if run else CallOrders() for run in runs])

        return VerifiedStep(self._verification, self._single_replicas, verified, phase, call)
