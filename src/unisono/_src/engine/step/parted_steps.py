"""Steps whose replicas run in several calls.

There are calls for each phase on all devices, the exchange, and the end of the step. The end of a step and the first replicas of
the next one are one call, if one program does both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from unisono._src.engine.device_mesh import DeviceMesh, get_mesh
from unisono._src.engine.exchange.protocol import Exchange, FinishedSums, SumDescription
from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.step.call_inputs import END, NOTHING, CallOrders, Orders
from unisono._src.engine.step.device_state import DeviceState
from unisono._src.engine.step.observer import LoneReplica, StepObserver, WatchedPhase, join_words
from unisono._src.engine.step.plan import BatchPlan, Round
from unisono._src.engine.step.program import CallResult
from unisono._src.engine.step.program_calls import ProgramCalls
from unisono._src.engine.step.run_outputs import RunOutput
from unisono._src.engine.step.step_digests import StepDigests
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.typing import Logs


class CallOutcome(NamedTuple):
    """The results of one call's steps, or of one parted step."""

    logs: Logs
    outputs: list[RunOutput]
    digests: list[StepDigests]


NO_OUTCOME = CallOutcome({}, [], [])
"""Before the first step of a call."""

NoteEnd: TypeAlias = Callable[[list[GlobalBatch], CallOutcome], None]
"""Is called for each finished step."""


class OpenStep(NamedTuple):
    """A step whose totals are there, and whose end is not computed."""

    batch: GlobalBatch
    batch_plan: BatchPlan
    outputs: list[RunOutput]


class PartedSteps:
    """Steps on the devices of a placement, one after another."""

    def __init__(
        self,
        placement: Placement,
        exchange: Exchange,
        device_state: DeviceState,
        call: ProgramCalls,
        observers: Sequence[StepObserver],
        note_end: NoteEnd,
    ) -> None:
        self._placement = placement
        self._mesh = get_mesh(placement.devices)
        self._exchange = exchange
        self._device_state = device_state
        self._call = call
        self._observers = observers
        self._run_phase = next((observer.run_phase for observer in observers if observer.runs_phases), None)
        self._note_end = note_end
        self._open: OpenStep | None = None

    def run(
        self,
        batch: GlobalBatch,
        batch_plan: BatchPlan,
        is_watched: bool = False,
        send_next: Callable[[], None] | None = None,
    ) -> None:
        """Run a step until its totals are there.

        Its end is computed with the next step, or by `end`. `send_next` sends rows of the next step. It is called while the
        devices work.
        """
        if self._open is not None and not self._is_end_joined(self._open, batch, batch_plan):
            self.end()
        phases = self._call.prepare(batch, batch_plan)
        outputs: list[RunOutput] = []
        for phase in range(phases):
            ahead = send_next if phase == phases - 1 else None
            run = functools.partial(self._sum_phase, batch, batch_plan, phase, ahead)
            if is_watched and self._run_phase is not None:
                call_alone = functools.partial(self._call_alone, batch, batch_plan, phase)
                outputs = self._run_phase(WatchedPhase(phase, phases, self._device_state, call_alone), run)
            else:
                outputs = run()
        for observer in self._observers:
            observer.after_phases()
        self._open = OpenStep(batch, batch_plan, outputs)

    def end(self) -> None:
        """Compute the end of the last step, unless it is computed."""
        if self._open is not None:
            self._call_and_close(self._open.batch, self._open.batch_plan.nothing, ((END,),) * self._mesh.size)

    def _call_and_close(self, batch: GlobalBatch, round_: Round, orders: Orders) -> CallResult:
        """Call the program and report the end of an open step. After an interrupt the step is not ended twice."""
        step, self._open = self._open, None
        done = self._call([batch], round_, orders)
        if step is not None:
            get_activity().report_next_step()
            self._note_end([step.batch], CallOutcome(take_logs(self._mesh, done), step.outputs, done.digests))
        return done

    def _is_end_joined(self, step: OpenStep, batch: GlobalBatch, batch_plan: BatchPlan) -> bool:
        """Whether the next step's first call can end the open step. The same program must do both."""
        first = batch_plan.first_round
        is_same = step.batch_plan is batch_plan and step.batch.signature == batch.signature
        return is_same and first is not None and first.size == batch_plan.size_at_end

    def _sum_phase(
        self,
        batch: GlobalBatch,
        batch_plan: BatchPlan,
        phase: int,
        send_next: Callable[[], None] | None,
        lone: LoneReplica | None = None,
    ) -> list[RunOutput]:
        """Run the replicas of a phase, and give their outputs. Then all devices have the total of the phase."""
        finished: list[FinishedSums] = []
        outputs: list[RunOutput] = []
        layers = batch_plan.layers if lone is None else batch_plan.list_layers(alone=lone.replica)
        for layer in layers:
            for round_ in layer.rounds:
                apart = lone if lone is not None and lone.runs(round_) else None
                done = self._run_round(batch, round_, phase) if apart is None else apart.run(round_)
                outputs.append(RunOutput(self._mesh, round_.runs, done.outputs))
            is_last = layer is layers[-1]
            # The next layer reuses the buffer of the sums, so those of this layer are copied.
            sums = self._device_state.work.sums[phase] if is_last else self._device_state.take_sums(phase)
            finished.append(FinishedSums(layer.nodes, sums))
        if send_next is not None:
            send_next()
        if self._mesh.size > 1 or self._placement.processes is not None:  # else the one device has the total
            description = self._describe_sum(batch, batch_plan, phase)
            self._device_state.put_sums(phase, self._exchange.total(finished, description))
        return outputs

    def _run_round(self, batch: GlobalBatch, round_: Round, phase: int) -> CallResult:
        """Run the replicas of a round. The end of the open step is computed before them."""
        return self._call_and_close(batch, round_, order_round(round_, phase, after_end=self._open is not None))

    def _call_alone(self, batch: GlobalBatch, batch_plan: BatchPlan, phase: int, replica: int, device: int) -> CallResult:
        """Run one replica by itself on a device."""
        return self._run_round(batch, batch_plan.make_lone_round(replica, device), phase)

    def _describe_sum(self, batch: GlobalBatch, batch_plan: BatchPlan, phase: int) -> SumDescription:
        """Describe the all-reduce of a phase, with the integers sent along."""
        digest_program = functools.partial(self._call.digest_finishing, batch, batch_plan)
        words = join_words(self._observers, batch, digest_program)
        return SumDescription(batch_plan.leaves, batch_plan.of_processes, self._device_state.describe_sums(phase), words)

    def forget(self) -> None:
        """Drop what lies on the devices."""
        self._open = None


def take_logs(mesh: DeviceMesh, done: CallResult) -> Logs:
    """Take the lead's copies of logs."""
    return dict(zip(done.logs, mesh.on_lead(list(done.logs.values())), strict=True))


@functools.lru_cache(maxsize=256)
def order_round(round_: Round, phase: int, after_end: bool) -> Orders:
    """Build each device's orders for a phase of a round. With `after_end`, the end of the step before is computed first."""
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
        # Two steps of one call. The first has no rows and ends the step before, so the second has the first rows.
        return tuple((CallOrders(steps=2, finishing=1), orders._replace(since=1)) for orders in own)
    return tuple((orders,) for orders in own)
