"""Steps in phases. A function of state, batch and constants is traced for a batch and for its shards, analysed, and cut."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unisono._src.engine.cut_arrays import is_large
from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.phases.analysis import Analysis
from unisono._src.engine.phases.assembly import FrozenCalls
from unisono._src.engine.phases.interpreter import Shares, run_shards
from unisono._src.engine.phases.kinds import Everywhere, Kind, Layout, Local, Rows
from unisono._src.engine.phases.replica_code import copy_for_replicas
from unisono._src.engine.phases.run import PhasedStep, ShardPlace, ShardResult, Values
from unisono._src.engine.phases.sizes import replace_shards, resize_twins
from unisono._src.engine.phases.twins import ProgramsDifferError, Twins, leave_whole, pair
from unisono._src.engine.row_counts import count_batch_rows
from unisono._src.engine.state import State
from unisono._src.engine.step.call_inputs import CallInputs
from unisono._src.engine.step.plan import BatchPlan
from unisono._src.engine.step.traced_step import (
    InspectedProgram,
    Known,
    Part,
    ShardWork,
    StepArguments,
    StepEnd,
    StepFunction,
    TracedStep,
)
from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.native.step_calls import call_come_after, call_put_together
from unisono._src.old_objects import spare_old_objects
from unisono._src.placement import Placement
from unisono._src.programs.operands import get_shape, get_type, list_variables
from unisono._src.typed_jax import jaxpr_as_fun, map_tree, optimization_barrier
from unisono._src.typing import Array, PyTree

FROZEN_CALLS = FrozenCalls(call_put_together, call_come_after)


class WholeStep:
    """A step of one replica, which runs as traced."""

    phases = 1
    cut_places: frozenset[int] = frozenset()

    def __init__(self, traced: TracedStep) -> None:
        self._traced = traced

    def describe_outputs(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Describe in shapes what the replica returns."""
        return [jax.ShapeDtypeStruct(get_shape(output), get_type(output).dtype) for output in self._traced.outputs]

    def run_alone(self, known: Known, batch: PyTree) -> tuple[StepEnd, list[Array]]:
        run = jaxpr_as_fun(self._traced.program)
        return self._traced.end(run(*jax.tree.leaves((known.state, batch, known.constants))))


class PhasedCut:
    """A step on batches of one kind, in phases."""

    def __init__(self, traced: TracedStep, phased: PhasedStep, cut_places: frozenset[int]) -> None:
        self._traced = traced
        self.cut_places = cut_places
        """The places of the state's arrays that lie cut over devices."""
        self._phased = phased
        self.phases = len(phased.phases)

    def describe(self, phase: int, known: Known, batch: PyTree) -> ShardWork:
        shapes = self._phased.describe(phase, count_batch_rows(batch))
        return ShardWork(shapes.merged, self._list_outputs(phase, shapes.outputs), shapes.kept)

    def _list_outputs(self, phase: int, values: list[Array]) -> list[Array]:
        """List a phase's outputs in the order of the step's results. One value may be there twice."""
        known = dict(zip(self._phased.phases[phase].outputs, values, strict=True))
        variables = list_variables(self._phased.analysis.twins.outputs)
        return [known[variable] for variable in variables if variable in known]

    def describe_outputs(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Describe in shapes what a replica of this size returns."""
        return self._phased.describe_returned(rows)

    def list_gathered(self, phase: int, work: ShardWork) -> list[Array]:
        """List what a shard's work adds that is gathered rows."""
        plan = self._phased.phases[phase]
        return work.added[len(plan.merged) :][: len(plan.gathered)]

    def prepare(self, phase: int, known: Known) -> list[Array]:
        return self._phased.advance(phase, self._list_values(known), known.totals[phase - 1] if phase else [])

    def run_shard(self, phase: int, known: Known, batch: PyTree, kept: Sequence[list[Array]], place: ShardPlace) -> ShardWork:
        size, plan = count_batch_rows(batch), self._phased.phases[phase]
        values = self._list_values(known)
        own: Values = {}
        for of_phase, arrays in zip(self._phased.phases, kept, strict=False):
            own |= zip(of_phase.kept, arrays, strict=True)
        reads, uses = [values[v] for v in plan.reads], [own[v] for v in plan.uses]
        # Written before it is spread among zeros: the spreading must not change how it is computed.
        result = ShardResult(
            *optimization_barrier(self._phased.run_shard(phase, size, reads, jax.tree.leaves(batch), uses, place))
        )
        outputs = self._list_outputs(phase, result.outputs)
        return ShardWork(self._phased.spread(phase, size, result, place), outputs, result.kept)

    def finish(self, known: Known) -> StepEnd:
        """Compute the end of the step.

        Without the barrier XLA would hoist what reads no state out of the loop that ends the step. It would then be computed in
        calls that end no step, from incomplete sums. A loop on such sums may never end.
        """
        known = optimization_barrier(known) if self._phased.ends_with_loop else known
        values = self._list_values(known)
        values |= zip(self._phased.carries[-1], self._phased.advance(self.phases, values, known.totals[-1]), strict=True)
        outputs = self._phased.analysis.twins.outputs
        return self._traced.end([atom.val if isinstance(atom, core.Literal) else values.get(atom) for atom in outputs])[0]

    def inspect(self, state: State, rows: PyTree, constants: Sequence[Array], shards: Sequence[int]) -> list[Part]:
        """Compute some shards' parts of the gradients and of the loss."""
        run = run_shards(self._phased, jax.tree.leaves((state, constants)), jax.tree.leaves(rows))
        shares = [Shares(self._phased, run, shard) for shard in shards]
        return [
            (list(map(each.find, self._traced.gradients)), next(map(each.find, self._traced.losses), None)) for each in shares
        ]

    def _list_values(self, known: Known) -> Values:
        """Collect the values that are known, by variable."""
        values = self._phased.find_start(jax.tree.leaves((known.state, known.constants)))
        for carried, made in zip(self._phased.carries, known.made, strict=False):
            values |= zip(carried, made, strict=True)
        return values


class PhasedSteps:
    """The steps of one function."""

    def __init__(self, function: StepFunction, inputs: CallInputs, placement: Placement) -> None:
        self._function = function
        self._inputs = inputs
        self._lead = placement.lead
        self._has_one_replica = placement.replicas == 1
        self._has_kernels = placement.lead.platform == "cpu" and load_kernels().level is not None
        self._cuts: dict[Hashable, WholeStep | PhasedCut] = {}
        self._traced: dict[Hashable, TracedStep] = {}

    def cut(
        self, batch: GlobalBatch, batch_plan: BatchPlan, state: State, cut_places: frozenset[int] = frozenset()
    ) -> WholeStep | PhasedCut:
        """Find the step for a batch. It is traced and cut if it is new.

        `cut_places` are the places of the state's arrays that lie cut over devices.
        """
        key = self._inputs.kind(batch, batch.rows), batch_plan.sizes, cut_places
        if key not in self._cuts:
            self._cuts[key] = self._make_cut(batch, batch_plan.sizes, state, cut_places)
        return self._cuts[key]

    def list_unchanged(self, batch: GlobalBatch, state: State) -> set[int]:
        """List the places of the state's arrays that steps of such batches leave as they are."""
        program = self._trace(batch, batch.rows, state).program.jaxpr
        places = range(len(jax.tree.leaves(state)))
        return {place for place in places if program.outvars[place] is program.invars[place]}

    def _list_frozen(self, batch: GlobalBatch, state: State) -> set[int]:
        """List the places of large arrays that such steps leave as they are, on one device or cut over several.

        What is trained never lies cut in the steps of a model. In loops all may be.
        """
        if not self._has_kernels:
            return set()
        leaves = jax.tree.leaves(state)
        trained = 0 if self._function.is_of_replicas else len(state[0])
        return {place for place in self.list_unchanged(batch, state) if place >= trained and is_large(leaves[place])}

    @spare_old_objects()
    def _make_cut(
        self, batch: GlobalBatch, sizes: Sequence[int], state: State, cut_places: frozenset[int]
    ) -> WholeStep | PhasedCut:
        traced = self._trace(batch, batch.rows, state)
        if self._has_one_replica:
            return WholeStep(traced)
        try:
            twins = self._pair_any(traced, batch, sizes, state)
            phased = self._cut_twins(twins, batch, sizes, state, cut_places)
            if len(sizes) > 1:  # the rows of one shard alone are all rows
                self._function.note_gathered(phased.list_gathered())
            return PhasedCut(traced, phased, cut_places)
        except ProgramsDifferError as error:
            if len(sizes) > 1:
                self._function.note_other_programs(error)
            other = choose_traced(batch.rows, sizes)
            shapes = [leaf.shape for leaf in jax.tree.leaves(self._describe(batch, other, state))]
            whole = leave_whole(traced.program, shapes, batch.rows, other)
            return PhasedCut(traced, self._cut_twins(whole, batch, sizes, state, cut_places), cut_places)

    def _pair_any(self, traced: TracedStep, batch: GlobalBatch, sizes: Sequence[int], state: State) -> Twins:
        """Pair the batch's program with another size's, as twins.

        The other size is a shard's, or twice the batch's. The code has run for the batch. It may need more rows than a shard has,
        as for the five hardest of all, or branch on their number.
        """
        other = choose_traced(batch.rows, sizes)
        if self._function.is_of_replicas:  # such code runs on the rows of a replica
            return self._pair(traced, batch, other, state)
        reasons: list[Exception] = []
        for rows in (other, 2 * batch.rows):
            try:
                return self._pair(traced, batch, rows, state)
            except Exception as error:  # whatever the code raises
                reasons.append(error)
        text = f"The function cannot be traced for another number of rows than {batch.rows}."
        differing = (error.equation for error in reasons if isinstance(error, ProgramsDifferError))
        raise ProgramsDifferError(text, next(differing, None)) from reasons[-1]

    def _cut_twins(
        self, twins: Twins, batch: GlobalBatch, sizes: Sequence[int], state: State, cut_places: frozenset[int]
    ) -> PhasedStep:
        """Cut the step of a batch into shards of these sizes."""
        kinds = self._list_kinds(twins, batch, state)
        cut = copy_for_replicas(twins, kinds) if self._function.is_of_replicas else twins
        frozen = self._list_frozen(batch, state)
        analysis = Analysis(cut, kinds, len(sizes), frozen=frozen, cut=cut_places, frozen_calls=FROZEN_CALLS if frozen else None)
        in_shards = analysis.list_in_shards()
        by_size: list[Twins] = []
        for size in set(sizes):
            if size == twins.shard_rows:
                by_size.append(cut)
            elif twins.own_constants:  # only a trace of this size has its constants
                of_size = self._pair(self._trace(batch, batch.rows, state), batch, size, state)
                by_size.append(replace_shards(cut, twins, of_size))
            else:
                by_size.append(resize_twins(cut, size, in_shards))
        return PhasedStep(analysis, by_size, sizes, self._function.returns_rows)

    def _pair(self, traced: TracedStep, batch: GlobalBatch, size: int, state: State) -> Twins:
        return pair(traced.program, self._trace(batch, size, state).program, batch.rows, size)

    def _list_kinds(self, twins: Twins, batch: GlobalBatch, state: State) -> list[Kind]:
        """List the kinds of the inputs. These are state, rows, carried values and constants."""
        before = len(jax.tree.leaves(state))
        after = len(twins.inputs) - len(self._inputs.constants)
        carried = range(before + len(batch.leaves), after)
        rows: list[Kind] = [Rows(Layout(0))] * len(batch.leaves)
        own: list[Kind] = [Rows(Layout(0)) if twins.fits(twins.inputs[place], Layout(0)) else Local() for place in carried]
        return [*[Everywhere()] * before, *rows, *own, *[Everywhere()] * (len(twins.inputs) - after)]

    def _describe(self, batch: GlobalBatch, rows: int, state: State) -> StepArguments:
        """Describe the step's arguments in shapes, for this number of rows.

        No shape is weakly typed, as a variable may be before the first step. Dtypes are those that JAX gives the arrays.
        """

        def describe(array: Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True))

        return StepArguments(*map_tree(describe, (state, self._inputs.shapes(batch, rows), self._inputs.constants)))

    def _trace(self, batch: GlobalBatch, rows: int, state: State) -> TracedStep:
        key = self._inputs.kind(batch, rows)
        if key not in self._traced:
            shapes = self._describe(batch, rows, state)
            with self._function.explain_rows(rows, batch.rows):
                self._traced[key] = TracedStep(self._function, shapes, self._lead)
        return self._traced[key]

    def inspect(
        self, batch: GlobalBatch, batch_plan: BatchPlan, state: State, batches: Sequence[PyTree]
    ) -> tuple[list[Part], list[InspectedProgram]]:
        """Compute each shard's parts, and list the whole batch's program.

        Nothing is known if values are carried over: they exist for replicas, not for the whole batch.
        """
        if self._inputs.has_carried:
            return [([None] * len(self._function.list_recorded()[0][1]), None)] * len(batches), []
        rows = jax.tree.unflatten(batch.structure, [np.asarray(leaf.array, leaf.dtype) for leaf in batch.leaves])
        cut, constants = self.cut(batch, batch_plan, state), list(map(jnp.asarray, self._inputs.constants))
        programs = [InspectedProgram(self._function, (state, rows, constants), rows, range(batch.counted_rows))]
        if isinstance(cut, WholeStep):
            end = cut.run_alone(Known(state, [], [], constants), rows)[0]
            return [(list(end.gradients), end.loss)], programs
        return cut.inspect(state, rows, constants, [shard.leaf for shard in batch_plan.shards]), programs


def choose_traced(rows: int, sizes: Sequence[int]) -> int:
    """Choose the second number of rows to trace. It is the size of a shard, but never one row."""
    return max((size for size in sizes if 1 < size < rows), default=2 if rows > 2 else rows + 1)
