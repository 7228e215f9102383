"""Steps whose replicas run in several calls: those of a phase on all devices, the exchange, and the end of the step.

The end of a step and the first replicas of the next one are one call, where one program does both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.device_mesh import get_mesh
from unisono._src.exchange.protocol import Exchange, FinishedSums
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.step.call_orders import NOTHING, CallOrders
from unisono._src.step.device_state import DeviceState
from unisono._src.step.plan import BatchPlan, Layer, Round, Runs
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
        self._no_runs: Runs = (None,) * self._mesh.size
        self._exchange = exchange
        self._device_state = device_state
        self._call = call
        self._start = start
        self._verification = verification
        self._single_replicas = SingleReplicas(placement, device_state)
        self._note_end = note_end
        self._open: OpenStep | None = None

    def run(self, batch: GlobalBatch, batch_plan: BatchPlan, verified: VerifiedReplica | None = None) -> None:
        """Run a step until its totals are there. Its end is computed with the next step, or by `end`."""
        phases = self._call.cut(batch, batch_plan, self._device_state.shapes).phases
        if self._placement.processes:
            self._start.receive_program(self._call.digest_finishing(batch, batch_plan))
        fault = None
        outputs: list[RunOutput] = []
        verified_phase = None if verified is None else self._choose_phase(verified, phases)
        for phase in range(phases):
            sum_once = functools.partial(self._sum_phase, batch, batch_plan, phase)
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
            orders = [[CallOrders(finishing=1)]] * self._mesh.size
            batch, batch_plan = self._open.batch, self._open.batch_plan
            self._close(self._call([batch], batch_plan, batch_plan.size_at_end, self._no_runs, orders))

    def _close(self, done: CallResult) -> None:
        """Tell that the open step is finished by a call."""
        assert self._open is not None
        step, self._open = self._open, None
        self._start.note_finished()
        get_activity().report_next_step()
        self._note_end([step.batch], CallOutcome(done.logs, step.outputs, done.digests, step.fault))

    def _sum_phase(
        self, batch: GlobalBatch, batch_plan: BatchPlan, phase: int, verified: VerifiedStep | None = None
    ) -> list[RunOutput]:
        """Run the replicas of a phase, and have their total on all devices: return their outputs."""
        finished: list[FinishedSums] = []
        outputs: list[RunOutput] = []
        layers = batch_plan.layers if verified is None else batch_plan.list_layers(alone=verified.replica)
        for layer in layers:
            for round_ in layer.rounds:
                if verified is not None and verified.runs(round_):
                    done = verified.run_replica(round_)
                else:
                    done = self._run_round(batch, batch_plan, round_, self._order_round(layer, round_, phase))
                outputs.append(RunOutput(self._mesh, round_.runs, done.outputs))
            is_last = layer is layers[-1]
            sums = self._device_state.work.sums[phase] if is_last else self._device_state.take_sums(phase)
            finished.append(FinishedSums(layer.nodes, sums))
        if self._mesh.size > 1 or self._placement.processes is not None:  # else the one device has the total
            attempt = None if self._verification is None else self._verification.words
            like = self._device_state.describe_sums(phase)
            description = describe_sum(batch_plan, like, batch, self._start.digests, attempt)
            self._device_state.put_sums(phase, self._exchange.total(finished, description))
        return outputs

    def _run_round(self, batch: GlobalBatch, batch_plan: BatchPlan, round_: Round, orders: Sequence[CallOrders]) -> CallResult:
        """Run replicas; the end of the open step is computed before them."""
        step = self._open
        if step is not None and not self._call.is_same_program((step.batch, step.batch_plan.size_at_end), (batch, round_.size)):
            self.end()
        if self._open is None:
            return self._call([batch], batch_plan, round_.size, round_.runs, [[order] for order in orders])
        both = [[CallOrders(steps=2, finishing=1), order._replace(since=1)] for order in orders]
        done = self._call([batch], batch_plan, round_.size, round_.runs, both)
        self._close(done)
        return done

    def _order_round(self, layer: Layer, round_: Round, phase: int) -> list[CallOrders]:
        """Return the orders of each device to run its replicas in a phase."""
        return [
            NOTHING
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

    def _choose_phase(self, verified: VerifiedReplica, phases: int) -> int:
        """Return the phase in which a replica is verified: phases take turns after all replicas have had theirs."""
        assert self._verification is not None
        return self._verification.count_turns(verified.step) // self._placement.replicas % phases

    def _open_verified(self, verified: VerifiedReplica, batch: GlobalBatch, batch_plan: BatchPlan, phase: int) -> VerifiedStep:
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
            runs = tuple(run if device == index else None for device in range(self._mesh.size))
            return self._call([batch], batch_plan, run.size, runs, [[orders] if run else [NOTHING] for run in runs])

        return VerifiedStep(self._verification, self._single_replicas, verified, phase, call)

    def forget(self) -> None:
        """Drop what lies on the devices."""
        self._open = None
        self._single_replicas.forget()
