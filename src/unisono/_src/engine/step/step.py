"""The step of fit, evaluate and `run`.

It takes state and global batches, and gives the new state, logs and outputs of replicas.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.exchange.protocol import Exchange
from unisono._src.engine.global_batch import GlobalBatch, want_row_digests
from unisono._src.engine.state import State, get_step_count
from unisono._src.engine.step.call_inputs import CallInputs
from unisono._src.engine.step.device_state import DeviceState
from unisono._src.engine.step.memory import StepMemory
from unisono._src.engine.step.observer import InspectedStep, StartState, StepObserver, WatchedStep, inspect_step
from unisono._src.engine.step.parted_steps import NO_OUTCOME, CallOutcome, PartedSteps
from unisono._src.engine.step.phased_steps import PhasedSteps
from unisono._src.engine.step.plan import BatchPlan, plan_batch
from unisono._src.engine.step.program_calls import ProgramCalls
from unisono._src.engine.step.run_outputs import CarriedValue, DescribeOutputs, RunOutput
from unisono._src.engine.step.step_digests import digest_state
from unisono._src.engine.step.traced_step import StepFunction
from unisono._src.engine.step.whole_steps import WholeSteps
from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.kernels.rewriting import rewrite_function
from unisono._src.placement import Placement
from unisono._src.typing import AnyArray, Array, Logs

MOST_STEPS = 64


class Step:
    """Steps of a placement's replicas, whatever they compute.

    Where each device runs replicas of one size, and they can add up inside of a call, one call takes several steps. Other steps are made of
    several calls.
    """

    def __init__(
        self,
        name: str,
        function: StepFunction,
        placement: Placement,
        exchange: Exchange,
        most_steps: int = MOST_STEPS,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        """Prepare steps of a program called `name`, at most `most_steps` a call."""
        self.observers = observers
        self._function = function
        self._plans = functools.cache(functools.partial(plan_batch, placement=placement))
        self._inputs = CallInputs(placement, most_steps)
        self._cutter = PhasedSteps(function, self._inputs, placement)
        self._mesh = get_mesh(placement.devices)
        self._device_state = DeviceState(placement)
        self._has_state = False
        self._wants_assigned = any(observer.wants_assigned for observer in observers)
        self._has_phases_run = any(observer.runs_phases for observer in observers)
        self._find_digest_program = functools.cache(functools.partial(make_digest_program, placement.lead.platform))
        self._call = ProgramCalls(
            name, self._cutter, placement, self._inputs, self._device_state, self._wants_digests, exchange.adds_in_programs
        )
        self._parted = PartedSteps(placement, exchange, self._device_state, self._call, observers, self._note_end)
        self._whole = WholeSteps(self._mesh, self._call)
        self._newest = NO_OUTCOME

    def __call__(self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = ()) -> tuple[Logs, State]:
        """Run steps and give the last one's logs and the state."""
        return self.outputs(state, batches, constants)[0], self.state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = (), carried: Sequence[CarriedValue] = ()
    ) -> tuple[Logs, list[RunOutput]]:
        """Run steps and give the last one's logs and replica outputs.

        The new state is then `self.state`. Replicas get rows, or (rows, values) if values of an earlier step are carried over.
        """
        self._newest, self._has_state = NO_OUTCOME, False
        if self._wants_digests:
            want_row_digests(batches)
        self._inputs.keep(constants, carried)
        for observer in self.observers:
            observer.begin(batches, constants)
        with self._call.interrupts.watch():
            self._take_steps(state, batches)
        return self._newest.logs, self._newest.outputs

    def _take_steps(self, state: State, batches: list[GlobalBatch]) -> None:
        while batches:
            number = get_step_count().steps
            unwatched = min([len(batches), *[observer.count_unwatched(number) for observer in self.observers]])
            now, batches = batches[: max(1, unwatched)], batches[max(1, unwatched) :]
            self._receive_state(state, now[0])
            if not unwatched:
                self._open_watched(number, now[0])
            try:
                groups = list(self._group_batches(now))
                for group, following in itertools.zip_longest(groups, groups[1:]):
                    self._run_group(group, following, is_watched=not unwatched)
            finally:
                self._parted.end()  # after an error too: else a step whose totals are there would be lost
            if batches:
                state = self.state

    def _receive_state(self, state: State, batch: GlobalBatch) -> None:
        """Bring the state to the devices, for steps of such batches."""
        assigned = self._device_state.list_assigned(state) if self._wants_assigned else []
        list_unchanged = functools.partial(self._cutter.list_unchanged, batch, state)
        is_other = self._device_state.receive_state(state, list_unchanged)
        self._has_state = True
        for observer in self.observers:
            observer.take_state(StartState(is_other, assigned, lambda: self._device_state.lead_state, self._digest_state))

    def _digest_state(self) -> Array:
        program = self._find_digest_program(self._device_state.cut_places)
        return program(self._mesh.lead, None, self._device_state.lead_program_state)

    def _open_watched(self, number: int, batch: GlobalBatch) -> None:
        """Show a step to the observers before it reads rows."""
        batch_plan = self._plan_of(batch)

        def inspect() -> InspectedStep:
            state = self._device_state.lead_state
            return inspect_step(self._function.list_recorded(), state, batch, batch_plan, self._inputs, self._cutter)

        for observer in self.observers:
            observer.before_rows(WatchedStep(number, batch_plan, inspect))

    def _run_group(self, group: list[GlobalBatch], following: list[GlobalBatch] | None, is_watched: bool) -> None:
        """Run the steps of a group, which another may follow."""
        batch_plan = self._plan_of(group[0])
        whole = None if is_watched and self._has_phases_run else self._whole.decide(group[0], batch_plan)
        if whole is None:
            send_next = functools.partial(self._send_ahead, following) if following else None
            self._parted.run(group[0], batch_plan, is_watched, send_next)
        else:
            self._parted.end()
            self._note_end(group, self._whole.run(group, batch_plan, whole))

    def _send_ahead(self, group: list[GlobalBatch]) -> None:
        """Send the first rows of a later step to the devices."""
        batch_plan = self._plan_of(group[0])
        if batch_plan.whole is None and batch_plan.first_round is not None:  # several whole steps are sent together
            self._inputs.send_batches(group[:1], batch_plan.first_round)

    def _note_end(self, group: list[GlobalBatch], outcome: CallOutcome) -> None:
        """Report finished steps to the observers."""
        self._newest = outcome
        for observer in self.observers:
            observer.after_steps(group, outcome.digests)

    @property
    def _wants_digests(self) -> bool:
        """Whether any observer needs digests of the steps."""
        return any(observer.wants_digests for observer in self.observers)

    @property
    def state(self) -> State:
        """The newest state, on the lead. It is empty if the last call stopped before it took its state."""
        return self._device_state.give_state() if self._has_state else ()

    def describe_outputs(self, batch: GlobalBatch) -> DescribeOutputs:
        """Make what describes a replica's outputs, by its rows, of the last step. It was of this batch."""
        state = self._device_state
        return self._cutter.cut(batch, self._plan_of(batch), state.shapes, state.cut_places).describe_outputs

    def measure_memory(self, state: State, batch: GlobalBatch, cut_places: frozenset[int] = frozenset()) -> StepMemory:
        """Measure what such steps need on each device.

        The program is compiled, and nothing is sent or run. The state may be given in shapes. Of its arrays at `cut_places` those lie cut
        that steps leave unchanged.
        """
        cut_places = cut_places.intersection(self._cutter.list_unchanged(batch, state)) if cut_places else cut_places
        return self._call.measure_memory(state, batch, self._plan_of(batch), cut_places)

    @property
    def has_own_logs(self) -> bool:
        """Whether logs differ from the metrics' results. It is known after the first call."""
        return self._function.has_own_logs

    def forget(self) -> None:
        """Drop what lies on the devices; the next step sends it again."""
        self._device_state.forget()
        self._inputs.forget()
        self._parted.forget()
        for observer in self.observers:
            observer.forget()
        self._has_state = False

    def _plan_of(self, batch: GlobalBatch) -> BatchPlan:
        return self._plans(batch.rows, batch.sizes)

    def _group_batches(self, batches: list[GlobalBatch]) -> Iterator[list[GlobalBatch]]:
        """Yield lists of batches that one call can take."""
        for _, same in itertools.groupby(batches, key=lambda batch: (batch.rows, batch.sizes, batch.signature)):
            same = list(same)
            whole = self._whole.decide(same[0], self._plan_of(same[0]))
            most = self._inputs.count_steps(same[0], whole.size) if whole else 1
            for start in range(0, len(same), most):
                yield same[start : start + most]


def make_digest_program(platform: str, cut_places: frozenset[int]) -> DeviceProgram:
    """Make a program that digests a state on one device."""
    return DeviceProgram(rewrite_function(functools.partial(digest_state, cut_places=cut_places), platform))
