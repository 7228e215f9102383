"""Steps whose replicas run in several calls: those of a phase on all devices, the exchange, and the end of the step.

The end of a step and the first replicas of the next one are one call, where one program does both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.device_mesh import get_mesh
from unisono._src.exchange.protocol import Exchange, FinishedSums
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.step.call_orders import END, NOTHING, CallOrders, Orders
from unisono._src.step.device_state import DeviceState
from unisono._src.step.plan import BatchPlan, Round
from unisono._src.step.program import CallResult
from unisono._src.step.program_calls import ProgramCalls
from unisono._src.step.run_outputs import RunOutput
from unisono._src.step.single_replica import SingleReplicas
from unisono._src.step.step_digests import StepDigests
from unisono._src.step.step_start import StepStart
from unisono._src.step.totals import describe_sum
from unisono._src.step.verification import DeviceFaultError, Verification, VerifiedReplica
from unisono._src.step.verified_step import VerifiedStep
from unisono._src.typing import Logs


class CallOutcome(NamedTuple):
    """The results of the steps of one call, or of one step in several calls."""

    logs: Logs
    outputs: list[RunOutput]
    digests: list[StepDigests]
    fault: DeviceFaultError | None = None
    """To be raised now that the step is finished: a device was found to be at fault."""


NoteEnd: TypeAlias = Callable[[list[GlobalBatch], CallOutcome], None]
"""Is told of each step that is finished."""


class OpenStep(NamedTuple):
    """A step whose totals are there, and whose end is not computed."""

    batch: GlobalBatch
    batch_plan: BatchPlan
    outputs: list[RunOutput]
    fault: DeviceFaultError | None


class PartedSteps:
    """Steps on the devices of a placement, one after another."""

    def __init__(
        self,
        placement: Placement,
        exchange: Exchange,
        device_state: DeviceState,
        call: ProgramCalls,
        start: StepStart,
        verification: Verification | None,
        note_end: NoteEnd,
    ) -> None:
        self._placement = placement
        self._mesh = get_mesh(placement.devices)
        self._exchange = exchange
        self._device_state = device_state
        self._call = call
        self._start = start
        self._verification = verification
        self._single_replicas = SingleReplicas(placement, device_state)
        self._note_end = note_end
        self._open: OpenStep | None = None

    def run(
        self,
        batch: GlobalBatch,
        batch_plan: BatchPlan,
        verified: VerifiedReplica | None = None,
        send_next: Callable[[], None] | None = None,
    ) -> None:
        """Run a step until its totals are there. Its end is computed with the next step, or by `end`.

        `send_next` sends rows of the next step. It is called while the devices work.
        """
        if self._open is not None and not self._is_end_joined(self._open, batch, batch_plan):
            self.end()
        phases = self._call.prepare(batch, batch_plan)
        if self._placement.processes:
            self._start.receive_program(self._call.digest_finishing(batch, batch_plan))
        fault = None
        outputs: list[RunOutput] = []
        verified_phase = None if verified is None else self._choose_phase(verified, phases)
        for phase in range(phases):
            ahead = send_next if phase == phases - 1 else None
            sum_once = functools.partial(self._sum_phase, batch, batch_plan, phase, ahead)
            if verified is not None and phase == verified_phase:
                step = self._open_verified(verified, batch, batch_plan, phase)
                outputs, fault = step.sum_rounds(functools.partial(sum_once, verified=step))
            else:
                outputs = sum_once()
        if self._verification is not None:
            self._verification.check_processes()
        self._open = OpenStep(batch, batch_plan, outputs, fault)

    def end(self) -> None:
        """Compute the end of the last step, if it is not computed yet."""
        if self._open is not None:
            self._call_and_close(self._open.batch, self._open.batch_plan.nothing, ((END,),) * self._mesh.size)

    def _call_and_close(self, batch: GlobalBatch, round_: Round, orders: Orders) -> CallResult:
        """Call the program, and tell that the open step is finished, if there is one. After an interrupt it is not ended twice."""
        step, self._open = self._open, None
        done = self._call([batch], round_, orders)
        if step is not None:
            self._start.note_finished()
            get_activity().report_next_step()
            logs = dict(zip(done.logs, self._mesh.on_lead(list(done.logs.values())), strict=True))
            self._note_end([step.batch], CallOutcome(logs, step.outputs, done.digests, step.fault))
        return done

    def _is_end_joined(self, step: OpenStep, batch: GlobalBatch, batch_plan: BatchPlan) -> bool:
        """Return whether the first call of the next step is of the program that ends the open one."""
        first = batch_plan.first_round
        is_same = step.batch_plan is batch_plan and step.batch.signature == batch.signature
        return is_same and first is not None and first.size == batch_plan.size_at_end

    def _sum_phase(
        self,
        batch: GlobalBatch,
        batch_plan: BatchPlan,
        phase: int,
        send_next: Callable[[], None] | None,
        verified: VerifiedStep | None = None,
    ) -> list[RunOutput]:
        """Run the replicas of a phase, and have their total on all devices: return their outputs."""
        finished: list[FinishedSums] = []
        outputs: list[RunOutput] = []
        layers = batch_plan.layers if verified is None else batch_plan.list_layers(alone=verified.replica)
        for layer in layers:
            for round_ in layer.rounds:
                lone = verified if verified is not None and verified.runs(round_) else None
                done = self._run_round(batch, round_, phase) if lone is None else lone.run_replica(round_)
                outputs.append(RunOutput(self._mesh, round_.runs, done.outputs))
            is_last = layer is layers[-1]
            sums = self._device_state.work.sums[phase] if is_last else self._device_state.take_sums(phase)
            finished.append(FinishedSums(layer.nodes, sums))
        if send_next is not None:
            send_next()
        if self._mesh.size > 1 or self._placement.processes is not None:  # else the one device has the total
            attempt = None if self._verification is None else self._verification.words
            like = self._device_state.describe_sums(phase)
            description = describe_sum(batch_plan, like, batch, self._start.digests, attempt)
            self._device_state.put_sums(phase, self._exchange.total(finished, description))
        return outputs

    def _run_round(self, batch: GlobalBatch, round_: Round, phase: int) -> CallResult:
        """Run replicas; the end of the open step is computed before them."""
        return self._call_and_close(batch, round_, order_round(round_, phase, after_end=self._open is not None))

    def _choose_phase(self, verified: VerifiedReplica, phases: int) -> int:
        """Return the phase in which a replica is verified: phases take turns after all replicas have had theirs."""
        assert self._verification is not None
        return self._verification.count_turns(verified.step) // self._placement.replicas % phases

    def _open_verified(self, verified: VerifiedReplica, batch: GlobalBatch, batch_plan: BatchPlan, phase: int) -> VerifiedStep:
        """Return the step with what runs the replica that it verifies."""
        assert self._verification is not None

        def call(index: int) -> CallResult:
            return self._run_round(batch, batch_plan.make_lone_round(verified.replica, index), phase)

        return VerifiedStep(self._verification, self._single_replicas, verified, phase, call)

    def forget(self) -> None:
        """Drop what lies on the devices."""
        self._open = None
        self._single_replicas.forget()


@functools.lru_cache(maxsize=256)
def order_round(round_: Round, phase: int, after_end: bool) -> Orders:
    """Return the orders of each device to run its replicas in a phase. `after_end`: the end of the step before is computed first."""
    own = [
        NOTHING
        if run is None
        else CallOrders(
            first=run.first,
            replicas=run.count,
            before=run.before,
            place=place,
            row=run.rows.start,
            phase=phase,
            end=phase + 1,
            summing=int(is_last),
        )
        for run, place, is_last in zip(round_.runs, round_.places, round_.is_last, strict=True)
    ]
    if after_end:
        return tuple((CallOrders(steps=2, finishing=1), orders._replace(since=1)) for orders in own)
    return tuple((orders,) for orders in own)
