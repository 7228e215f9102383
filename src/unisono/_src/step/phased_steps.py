"""Steps in phases: a function of (state, batch) is traced for a batch and for its shards, analysed, and cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence, Set
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.inlining import inline_calls
from unisono._src.operands import list_variables
from unisono._src.phases.analysis import Analysis, match_scopes
from unisono._src.phases.interpreter import Shares, run_shards
from unisono._src.phases.marks import find_marked
from unisono._src.phases.run import PhasedStep, ShardPlace, ShardResult, Values
from unisono._src.phases.sizes import resize_twins
from unisono._src.phases.twins import ProgramsDifferError, Twins, leave_whole, pair
from unisono._src.placement import Placement
from unisono._src.replica.model_step import GRADIENT, LOCAL, LOSS
from unisono._src.replica.protocol import State
from unisono._src.replica.untold_loss import UNTOLD_LOSS
from unisono._src.step.cut_step import InspectedProgram, Known, Part, ShardWork, StepEnd
from unisono._src.step.plan import BatchPlan
from unisono._src.typed_jax import jaxpr_as_fun, optimization_barrier
from unisono._src.typing import Array, Logs, PyTree
from unisono._src.xla import determinism
from unisono._src.xla.rewrite import replace_for_shards, trace_as_rewritten

StepFunctionOfArrays = Callable[[State, PyTree], tuple[State, Logs]]


class Marked(NamedTuple):
    """The values that are marked in a program."""

    gradients: list[core.Var]
    loss: core.Var | None


class TracedStep:
    """The program of a step for a number of rows; behind its results, what is marked in it."""

    def __init__(self, function: StepFunctionOfArrays, state: State, batch: PyTree, lead: jax.Device) -> None:
        with jax.default_device(determinism.choose_compile_device(lead)), replace_for_shards(LOCAL):
            traced, self._shapes = trace_as_rewritten(function, lead.platform)(state, batch)
        program = inline_calls(traced)
        losses = find_marked(program.jaxpr, LOSS)
        self.marked = Marked(find_marked(program.jaxpr, GRADIENT), losses[0] if losses else None)
        marked = [*self.marked.gradients, *losses[:1]]
        self.program = core.ClosedJaxpr(program.jaxpr.replace(outvars=[*program.jaxpr.outvars, *marked]), program.consts)

    def end(self, results: Sequence[Array | None]) -> StepEnd:
        """Return the results of the program as those of a step. Logs that are None are left out."""
        counts = [len(jax.tree.leaves(self._shapes[0])), len(self._shapes[1]), len(self.marked.gradients)]
        state, logs, gradients, _ = (
            results[start:end] for start, end in itertools.pairwise([0, *itertools.accumulate(counts), None])
        )
        told = {name: log for name, log in zip(sorted(self._shapes[1]), logs, strict=True) if log is not None}
        loss = None if self.marked.loss is None else results[-1]
        loss = jnp.asarray(UNTOLD_LOSS) if loss is None else loss
        told_gradients = [gradient for gradient in gradients if gradient is not None]
        return StepEnd(jax.tree.unflatten(jax.tree.structure(self._shapes[0]), state), told, told_gradients, loss, [])


class WholeStep:
    """A step of one replica, which runs as it was traced."""

    phases = 1

    def __init__(self, traced: TracedStep) -> None:
        self._traced = traced

    def run_alone(self, known: Known, batch: PyTree) -> tuple[StepEnd, list[Array]]:
        run = jaxpr_as_fun(self._traced.program)
        return self._traced.end(run(*jax.tree.leaves((known.state, batch)))), []


class PhasedCut:
    """A step on batches of one kind, in phases."""

    def __init__(self, traced: TracedStep, phased: PhasedStep) -> None:
        self._traced = traced
        self._phased = phased
        self.phases = len(phased.phases)

    def describe(self, phase: int, known: Known, batch: PyTree) -> ShardWork:
        shapes = self._phased.describe(phase, count_rows(batch))
        return ShardWork(shapes.merged, self._list_outputs(phase, shapes.outputs), shapes.kept)

    def _list_outputs(self, phase: int, values: list[Array]) -> list[Array]:
        """Return what stays on the shards of a phase, in the order of the results of the step, in which one value may be twice."""
        known = dict(zip(self._phased.phases[phase].outputs, values, strict=True))
        variables = list_variables(self._phased.analysis.twins.outputs)
        return [known[variable] for variable in variables if variable in known]

    def prepare(self, phase: int, known: Known) -> list[Array]:
        return self._phased.advance(phase, self._list_values(known), known.totals[phase - 1] if phase else [])

    def run_shard(
        self, phase: int, known: Known, batch: PyTree, kept: Sequence[list[Array]], place: ShardPlace, replica: Array
    ) -> ShardWork:
        size, plan = count_rows(batch), self._phased.phases[phase]
        values = self._list_values(known)
        own: Values = {}
        for of_phase, arrays in zip(self._phased.phases, kept, strict=False):
            own |= zip(of_phase.kept, arrays, strict=True)
        reads, uses = [values[v] for v in plan.reads], [own[v] for v in plan.uses]
        result = ShardResult(
            *optimization_barrier(self._phased.run_shard(phase, size, reads, jax.tree.leaves(batch), uses, place))
        )
        outputs = self._list_outputs(phase, result.outputs)
        return ShardWork(self._phased.spread(phase, size, result, place), outputs, result.kept)

    def finish(self, known: Known, present: Array) -> StepEnd:
        """Return the end of the step.

        XLA would compute what reads no state where the step does not end, too, from sums that are not complete, on which a loop may never end.
        """
        known = optimization_barrier(known) if self._phased.ends_with_loop else known
        values = self._list_values(known)
        values |= zip(self._phased.carries[-1], self._phased.advance(self.phases, values, known.totals[-1]), strict=True)
        outputs = self._phased.analysis.twins.outputs
        return self._traced.end([atom.val if isinstance(atom, core.Literal) else values.get(atom) for atom in outputs])

    def run_alone(self, known: Known, batch: PyTree) -> tuple[StepEnd, list[Array]]:
        raise AssertionError("a step of one replica is not cut")

    def inspect(self, state: State, rows: PyTree, shards: Sequence[int]) -> list[Part]:
        """Return what some shards give to the gradients and to the loss."""
        run = run_shards(self._phased, jax.tree.leaves(state), jax.tree.leaves(rows))
        marked = self._traced.marked
        shares = [Shares(self._phased, run, shard) for shard in shards]
        return [
            (list(map(each.find, marked.gradients)), None if marked.loss is None else each.find(marked.loss)) for each in shares
        ]

    def _list_values(self, known: Known) -> Values:
        """Return what is known of the step's values."""
        values = self._phased.find_start(jax.tree.leaves(known.state))
        for carried, made in zip(self._phased.carries, known.made, strict=False):
            values |= zip(carried, made, strict=True)
        return values

    def list_read(self) -> set[int]:
        """Return the arrays of the state that are read before the end of the step, by their places among all arrays."""
        read = self._phased.list_read_before_end()
        return {place for place, variable in enumerate(self._phased.analysis.twins.inputs) if variable in read}


class PhasedSteps:
    """The steps of one function: of (state, batch), to (state, logs)."""

    def __init__(self, function: StepFunctionOfArrays, placement: Placement, keeps_rows: bool = False) -> None:
        """`keeps_rows`: rows that the function returns beside the state stay on the shards, as outputs."""
        self._function = function
        self._keeps_rows = keeps_rows
        self._lead = placement.lead
        self._has_one_replica = placement.replicas == 1
        self._cuts: dict[Hashable, WholeStep | PhasedCut] = {}
        self._traced: dict[Hashable, TracedStep] = {}
        self._read: set[tuple[int, int]] | None = None

    def cut(self, batch: GlobalBatch, batch_plan: BatchPlan, state: State) -> WholeStep | PhasedCut:
        """Return the step for a batch."""
        key = batch.signature, batch.rows, batch_plan.sizes
        if key not in self._cuts:
            self._cuts[key] = self._make_cut(batch, batch_plan.sizes, state)
            self._read = None
        return self._cuts[key]

    def _make_cut(self, batch: GlobalBatch, sizes: Sequence[int], state: State) -> WholeStep | PhasedCut:
        traced = self._trace(batch, batch.rows, state)
        if self._has_one_replica:
            return WholeStep(traced)
        rows = batch.rows
        has_rows = [False] * len(jax.tree.leaves(state)) + [True] * len(batch.leaves)
        try:
            return PhasedCut(traced, self._cut_twins(self._pair(traced, batch, sizes, state), has_rows, sizes))
        except ProgramsDifferError:
            other = choose_traced(rows, sizes)
            shapes = [leaf.shape for leaf in jax.tree.leaves((state, batch.shapes(other)))]
            return PhasedCut(traced, self._cut_twins(leave_whole(traced.program, shapes, rows, other), has_rows, sizes))

    def _pair(self, traced: TracedStep, batch: GlobalBatch, sizes: Sequence[int], state: State) -> Twins:
        """Return the programs of the batch and of another number of rows as twins: of a shard's, or of twice the batch's.

        The code has run for the batch. It may want more rows than a shard has, as the five hardest of all, or branch on their number.
        """
        reason: Exception | None = None
        for other in (choose_traced(batch.rows, sizes), 2 * batch.rows):
            try:
                return pair(traced.program, self._trace(batch, other, state).program, batch.rows, other)
            except Exception as error:  # whatever the code raises
                reason = error
        raise ProgramsDifferError(f"The function cannot be traced for another number of rows than {batch.rows}.") from reason

    def _cut_twins(self, twins: Twins, has_rows: Sequence[bool], sizes: Sequence[int]) -> PhasedStep:
        """Return the step of a batch, cut into shards of these sizes."""
        analysis = Analysis(twins, has_rows, match_scopes(LOCAL))
        of_shards = analysis.list_in_shards()
        by_size = [twins if size == twins.shard_rows else resize_twins(twins, size, of_shards) for size in set(sizes)]
        return PhasedStep(analysis, by_size, sizes, self._keeps_rows)

    def _trace(self, batch: GlobalBatch, rows: int, state: State) -> TracedStep:
        key = batch.signature, rows
        if key not in self._traced:
            self._traced[key] = TracedStep(self._function, state, batch.shapes(rows), self._lead)
        return self._traced[key]

    def inspect(
        self, batch: GlobalBatch, batch_plan: BatchPlan, state: State, batches: Sequence[PyTree]
    ) -> tuple[list[Part], list[InspectedProgram]]:
        """Return what each shard of this process gives, and the program of the whole batch."""
        rows = jax.tree.unflatten(batch.structure, [np.asarray(leaf.array, leaf.dtype) for leaf in batch.leaves])
        cut = self.cut(batch, batch_plan, state)
        programs = [InspectedProgram(self._function, (state, rows), rows, range(batch.counted_rows))]
        if isinstance(cut, WholeStep):
            end = cut.run_alone(Known(state, [], [], jnp.zeros(0), []), rows)[0]
            return [(list(end.gradients), end.loss)], programs
        return cut.inspect(state, rows, [shard.leaf for shard in batch_plan.shards]), programs

    def list_numbers(self, batch: GlobalBatch, batch_plan: BatchPlan, size: int, state: State) -> tuple[float, ...]:
        """Return the numbers that a program reads: none."""
        return (0.0,)

    def list_read(self, state: State) -> Set[tuple[int, int]]:
        """Return the arrays of the state that shards read, by group and place in it: those of all batches so far."""
        if self._read is None:
            places = set[int]().union(*(cut.list_read() for cut in self._cuts.values() if isinstance(cut, PhasedCut)))
            flat = [(group, place) for group, arrays in enumerate(state) for place in range(len(arrays))]
            self._read = {each for number, each in enumerate(flat) if number in places}
        return self._read

    def check(self, batch: GlobalBatch, size: int, state: State) -> None:
        """Look at nothing: draws, losses and metrics have the numbers of the whole batch."""


def choose_traced(rows: int, sizes: Sequence[int]) -> int:
    """Return the number of rows for which a step is traced beside that of the batch: the size of a shard, but not of one row."""
    return max((size for size in sizes if 1 < size < rows), default=2 if rows > 2 else rows + 1)


def count_rows(batch: PyTree) -> int:
    return jax.tree.leaves(batch)[0].shape[0]
