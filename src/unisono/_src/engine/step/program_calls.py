"""The calls of a step's programs, on any device of the placement."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
from jax.extend.core import ClosedJaxpr
from jax.stages import Compiled

from unisono._src.engine import packing
from unisono._src.engine.cut_arrays import STAND_IN
from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.state import State
from unisono._src.engine.step import running_sums
from unisono._src.engine.step.call_inputs import NOTHING, CallInputs, Orders
from unisono._src.engine.step.device_state import BufferLayout, DeviceState
from unisono._src.engine.step.memory import StepMemory, count_bytes, measure_step
from unisono._src.engine.step.phased_steps import PhasedCut, PhasedSteps, WholeStep
from unisono._src.engine.step.plan import BatchPlan, Round
from unisono._src.engine.step.program import CallResult, StepBuffers, StepProgram, StepShapes
from unisono._src.engine.xla import determinism
from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.engine.xla.runtime import Interrupts
from unisono._src.kernels.native.step_calls import SUMMED_DTYPES
from unisono._src.kernels.rewriting import rewrite_function, trace_as_rewritten
from unisono._src.placement import Placement
from unisono._src.programs.program_digest import digest_program
from unisono._src.typed_jax import map_tree
from unisono._src.typing import Arguments, Array, PyTree

CUT_RESULTS = StepBuffers(False, True, True), CallResult(False, True, False)  # pyright: ignore[reportArgumentType]
"""The results of the step program that differ from device to device."""


class ProgramCalls:
    """Calls start from the device state, and leave the new one there. Each runs on all devices of the process."""

    def __init__(
        self,
        name: str,
        cutter: PhasedSteps,
        placement: Placement,
        inputs: CallInputs,
        device_state: DeviceState,
        is_recorded: bool,
        adds_inside: bool,
    ) -> None:
        """Keep what all calls need.

        Args:
            name: What profiles call the programs.
            is_recorded: Whether digests of the steps are wanted.
            adds_inside: Whether several devices may add up inside of programs.
        """
        self._name = name
        self._adds_inside = adds_inside
        self._cutter = cutter
        self._placement = placement
        self._mesh = get_mesh(placement.devices)
        self._inputs = inputs
        self.interrupts = Interrupts()
        """Ctrl-C waits while the state is between two calls."""
        self._device_state = device_state
        self._is_recorded = is_recorded
        self._cut: PhasedCut | WholeStep | None = None
        """The kind of steps that are called."""
        self._functions: dict[PhasedCut | WholeStep, StepProgram] = {}
        self._programs: dict[PhasedCut | WholeStep, DeviceProgram] = {}
        self._shapes: dict[Hashable, StepShapes] = {}
        self._layouts: dict[Hashable, BufferLayout] = {}
        self._digests: dict[Hashable, int] = {}
        """Digests of the programs, if several processes train together."""
        self._traced: Hashable = None
        """What the newest program is for, by which its digest is kept."""

    def prepare(self, batch: GlobalBatch, batch_plan: BatchPlan) -> int:
        """Select the kind of the next steps and count its phases."""
        state = self._device_state
        cut = self._cut = self._choose_cut(batch, batch_plan, state.shapes, state.cut_places)
        self._device_state.set_layout(self._lay_out(cut, batch, batch_plan, state.program_state))
        return cut.phases

    def _choose_cut(
        self, batch: GlobalBatch, batch_plan: BatchPlan, state: State, cut_places: frozenset[int] = frozenset()
    ) -> PhasedCut | WholeStep:
        """Choose the kind of a batch's steps, and make its program if it is new."""
        cut = self._cutter.cut(batch, batch_plan, state, cut_places)
        if cut not in self._programs:
            function = StepProgram(self._name, cut, self._placement.replicas, self._is_recorded)
            note_traced = self._note_traced if self._placement.processes else None
            self._functions[cut] = function
            rewritten = rewrite_function(function, self._placement.lead.platform, note_traced)
            self._programs[cut] = DeviceProgram(rewritten, donate=(0,), cut=CUT_RESULTS)
        return cut

    def measure_memory(self, state: State, batch: GlobalBatch, batch_plan: BatchPlan, cut_places: frozenset[int]) -> StepMemory:
        """Measure what steps of a batch need on each device. The program of the largest shards is compiled."""
        cut = self._choose_cut(batch, batch_plan, state, cut_places)
        leaves = [STAND_IN if place in cut_places else leaf for place, leaf in enumerate(jax.tree.leaves(state))]
        state = jax.tree.unflatten(jax.tree.structure(state), leaves)
        layout = self._lay_out(cut, batch, batch_plan, state)
        size = max(batch_plan.sizes)
        work = StepBuffers(
            map_tree(lambda a: self._mesh.describe_everywhere(a.shape, a.dtype), state), *layout.describe(self._mesh)
        )
        kind = self._inputs.kind(batch, size)
        self._traced = cut, kind
        inputs = self._inputs.describe(batch, size)
        compiled = self._programs[cut].find_or_load(self._mesh, kind, work, *inputs)
        gathered = self._count_gathered(cut, batch, batch_plan, state)
        return measure_step(layout, gathered, inputs, self._mesh.size, compiled, cut_places)

    def _count_gathered(self, cut: PhasedCut | WholeStep, batch: GlobalBatch, batch_plan: BatchPlan, state: State) -> int:
        """Count the bytes of gathered rows in the running sums."""
        if not isinstance(cut, PhasedCut):
            return 0
        shards = self._describe(cut, batch, batch_plan, batch_plan.size_at_end, state).shards
        gathered = [array for phase, work in enumerate(shards) for array in cut.list_gathered(phase, work)]
        return running_sums.count_places(self._placement.replicas) * sum(map(count_bytes, gathered))

    def adds_up(self, batch: GlobalBatch, batch_plan: BatchPlan) -> bool:
        """Whether the program has the totals of such steps: of one device, or as it adds up over devices."""
        if self._mesh.size == 1 or not self._adds_inside:
            return self._mesh.size == 1
        phases = range(self.prepare(batch, batch_plan))
        return all(SUMMED_DTYPES.issuperset(self._device_state.describe_sums(phase)) for phase in phases)

    def _lay_out(self, cut: PhasedCut | WholeStep, batch: GlobalBatch, batch_plan: BatchPlan, state: State) -> BufferLayout:
        """Compute the layout of a step's buffers."""
        if self._placement.replicas == 1:
            return BufferLayout()
        sizes = sorted(set(batch_plan.sizes))
        key = cut, tuple(self._inputs.kind(batch, size) for size in sizes)
        if key not in self._layouts:
            by_size = {size: self._describe(cut, batch, batch_plan, size, state) for size in sizes}
            places = running_sums.count_places(self._placement.replicas)
            of_phases = [packing.measure_vectors(shard.added) for shard in by_size[batch_plan.size_at_end].shards]
            sums = tuple(tuple((name, ((places, size), name)) for name, size in lengths.items()) for lengths in of_phases)
            kept = tuple(
                (size, tuple(tuple(map(self._lay_out_kept, one.kept)) for one in by_size[size].shards)) for size in sizes
            )
            self._layouts[key] = BufferLayout(sums, kept if any(any(of_phases) for _, of_phases in kept) else ())
        return self._layouts[key]

    def _lay_out_kept(self, array: Array) -> tuple[tuple[int, ...], str]:
        return (self._placement.replicas, *array.shape), array.dtype.name

    def _describe(
        self, cut: PhasedCut | WholeStep, batch: GlobalBatch, batch_plan: BatchPlan, size: int, state: State
    ) -> StepShapes:
        """Describe in shapes a step's results, for shards of `size` rows."""
        key = cut, self._inputs.kind(batch, size)
        if key not in self._shapes:

            def describe(*args: PyTree) -> None:
                self._shapes[key] = self._functions[cut].describe(*args)

            lead = self._placement.lead
            with jax.default_device(
                determinism.choose_compile_device(lead)
            ):  # traced like the step program, which reuses this trace
                trace_as_rewritten(describe, lead.platform)(state, self._inputs.constants, self._inputs.shapes(batch, size))
        return self._shapes[key]

    def __call__(self, group: Sequence[GlobalBatch], round_: Round, orders: Orders) -> CallResult:
        """Call the program for the replicas of a round. Each device runs its own replicas by its orders."""
        program, args = self._find_program(group, round_, orders)
        with self.interrupts:
            self._device_state.work, done = program(*args)
        return done

    def digest_finishing(self, batch: GlobalBatch, batch_plan: BatchPlan) -> int:
        """Digest the program that finishes a step.

        It is traced and compiled first if it is new. Only programs of several processes are digested.
        """
        key = self._cut, self._inputs.kind(batch, batch_plan.size_at_end)
        if key not in self._digests:
            self._find_program([batch], batch_plan.nothing, ((NOTHING,),) * self._mesh.size)
        return self._digests[key]

    def _find_program(self, group: Sequence[GlobalBatch], round_: Round, orders: Orders) -> tuple[Compiled, Arguments]:
        """Find the program, loaded on the devices, and its arguments."""
        assert self._cut is not None  # calls are prepared
        args = (
            self._device_state.work,
            self._inputs.send_orders(orders),
            self._inputs.send_constants(),
            self._inputs.send_batches(group, round_),
        )
        kind = self._inputs.kind(group[0], round_.size)
        self._traced = self._cut, kind
        return self._programs[self._cut].find_or_load(self._mesh, kind, *args), args

    def _note_traced(self, program: ClosedJaxpr) -> None:
        self._digests[self._traced] = digest_program(program)
