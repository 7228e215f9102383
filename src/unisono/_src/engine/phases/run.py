"""Run the phases of a step.

These are functions for what a shard computes, how shards' results become one, and what follows from them.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from unisono._src.engine.phases.analysis import Analysis
from unisono._src.engine.phases.draws import DRAWS
from unisono._src.engine.phases.kinds import (
    OPERATIONS,
    Everywhere,
    Layout,
    Rows,
    combine,
    from_words,
    join_parts,
    make_identity,
    put_part,
    take_part,
    to_words,
    widen,
)
from unisono._src.engine.phases.rules import loops
from unisono._src.engine.phases.schedule import Phase, Schedule
from unisono._src.engine.phases.sizes import resize_twins
from unisono._src.engine.phases.twins import Planned, Twins, check_sizes
from unisono._src.programs.marks import REPLICA, is_marked
from unisono._src.programs.operands import Atom, count_bytes, get_dtype, get_shape, get_type, list_variables
from unisono._src.programs.private.jaxprs import bind
from unisono._src.typed_jax import eval_shape
from unisono._src.typing import Array, PyTree, Shape

Values: TypeAlias = dict[core.Var, Array]
Done: TypeAlias = dict[tuple[int, tuple[Hashable, ...]], tuple[list[Array], list[Array]]]
"""(operands, results) of a shard's equations, by the equation and the identities of its operands."""


class ShardResult(NamedTuple):
    """What a shard hands on at the end of a phase. The values are in the order of the lists of `Phase`."""

    merged: list[Array]
    gathered: list[Array]
    left: list[Array]
    outputs: list[Array]
    kept: list[Array]


class ShardPlace(NamedTuple):
    """The place of a shard in the batch."""

    number: Array
    """Its number among the shards that have rows."""
    row: Array
    """Its first row."""
    replica: Array
    """The number of its replica."""


class PhasedStep:
    """An analysed step as pure functions."""

    def __init__(
        self,
        analysis: Analysis,
        twins: Iterable[Twins],
        sizes: Sequence[int],
        keeps_rows: bool = False,
    ) -> None:
        """Schedule an analysed step.

        Args:
            analysis: The analysis of the step.
            twins: Those of each size of a shard.
            sizes: The rows of all shards that have some.
            keeps_rows: Whether rows that the step returns stay on the shards. Else they are gathered.
        """
        self.analysis = analysis
        self._assembly = analysis.assembly
        self.sizes = tuple(sizes)
        schedule = Schedule(analysis, keeps_rows)
        self.phases = schedule.phases
        self._everywhere = schedule.everywhere
        self.ends_with_loop = any(planned.equation.name in loops.RULES for planned in self._everywhere[-1])
        """Whether the end of the step holds a loop or a branch."""
        self._given = [variable for variable in analysis.twins.inputs if not isinstance(analysis.kinds[variable], Everywhere)]
        """The inputs that each shard has for itself: rows of the batch, and values of replicas."""
        self._places = {id(equation.whole): place for place, equation in enumerate(analysis.twins.equations)}
        self._twins = {one.shard_rows: one for one in twins}
        for one in self._twins.values():
            check_sizes(one, {v: kind.layout for v, kind in analysis.kinds.items() if isinstance(kind, Rows)})
        self._bases = schedule.bases
        self.carries = schedule.list_carries()
        """The values that are known from each stage on. A stage comes before each phase, and the last one before the end of the step."""

    def list_gathered(self) -> list[tuple[str, int]]:
        """List the rows gathered in the step: (the reader's scopes, bytes)."""
        gathered = (variable for phase in self.phases for variable in phase.gathered if variable in self.analysis.gathered)
        return [(self.analysis.gathered[v].layer, count_bytes(v)) for v in gathered]

    def advance(self, stage: int, known: Values, totals: Sequence[Array]) -> list[Array]:
        """Compute the values `self.carries[stage]`.

        They follow from the sums of the phase before and from what was known so far.
        """
        values = known | self.compute_everywhere(stage, known, totals)
        return [values[variable] for variable in self.carries[stage]]

    def compute_everywhere(self, stage: int, known: Values, totals: Sequence[Array]) -> Values:
        """Compute all values of a stage."""
        made = self._collect(stage - 1, totals, known) if stage else {}
        all_known = collections.ChainMap(made, known)
        after: list[Array] = []  # so that what is put together for one equation does not lie there before its turn
        for planned in self._everywhere[stage]:
            whole = planned.equation.whole
            operands = [self._read(atom, all_known, after) for atom in whole.invars]
            results = list(map(self._assembly.hold, whole.outvars, bind(whole, operands)))
            made.update(zip(whole.outvars, results, strict=True))
            after = results if self._assembly.is_read_by(planned) else after
        return made

    def _read(self, atom: Atom, known: Mapping[core.Var, Array], after: Sequence[Array]) -> Array:
        """Read a value that is the same everywhere. It is put together after other arrays, if it lies cut."""
        if isinstance(atom, core.Literal):
            return atom.val
        return self._assembly.read(atom, known, after)

    def find_start(self, state: Sequence[Array]) -> Values:
        """Collect what is known before the step: constants and state."""
        inputs = [variable for variable in self.analysis.twins.inputs if variable not in self._given]
        constants = {variable: jnp.asarray(value) for variable, value in self.analysis.twins.constants.items()}
        return constants | dict(zip(inputs, state, strict=True))

    def describe(self, number: int, size: int) -> ShardResult:
        """Describe in shapes what a shard of `size` rows hands on.

        Merged, gathered and left values are as `spread` returns them, in one list.
        """
        shapes = self._find_twins(size).shapes
        results = ShardResult(
            *([describe_array(shapes[variable], variable) for variable in of] for of in list_results(self.phases[number]))
        )
        place = eval_shape(ShardPlace, *[np.int32(0)] * 3)
        added = eval_shape(functools.partial(self.spread, number, size), results, place)
        return results._replace(merged=added, gathered=[], left=[])

    def describe_returned(self, size: int) -> list[jax.ShapeDtypeStruct]:
        """Describe in shapes what each replica of `size` rows returns. It may also be rows of a shard that stay there."""
        shapes, last = self._find_twins(size).shapes, self.phases[-1].outputs
        outputs = [variable for variable in list_variables(self.analysis.twins.outputs) if variable in last]
        return [jax.ShapeDtypeStruct(shapes[variable], get_type(variable).dtype) for variable in outputs]

    def _find_twins(self, size: int) -> Twins:
        """Find the twins of a size. There may be no shard of this size."""
        if size not in self._twins:
            self._twins[size] = resize_twins(self.analysis.twins, size, self.analysis.list_in_shards())
        return self._twins[size]

    def run_shard(
        self, number: int, size: int, reads: Sequence[Array], given: Sequence[Array], kept: Sequence[Array], place: ShardPlace
    ) -> ShardResult:
        """Compute a phase on a shard of `size` rows.

        Args:
            number: The phase.
            size: The rows of the shard.
            reads: The values of `phase.reads`.
            given: The shard's own inputs.
            kept: The values of `phase.uses`, kept in earlier phases.
            place: Where the shard lies in the batch.
        """
        phase = self.phases[number]
        known: Values = dict(zip(phase.reads, reads, strict=True))
        values: Values = dict(zip(self._given, given, strict=True)) | dict(zip(phase.uses, kept, strict=True))
        for variable in phase.reads:
            kind = self.analysis.kinds[variable]
            if isinstance(kind, Rows):  # gathered before
                values[variable] = take_part(known[variable], kind.layout, self.analysis.twins.rows, place.row, size)
        done: Done = {}
        held: set[core.Var] = set()
        for planned in phase.plan:
            self._assembly.hold_beside(planned, values, held)
            self._run_in_shard(planned, size, known, values, place, done)
            for variable in planned.equation.whole.outvars:
                if variable in phase.kept:  # a later phase compares it with its maximum: no fusion may round it once more
                    values[variable] = lax.optimization_barrier(values[variable])
        return ShardResult(*([values[variable] for variable in of] for of in list_results(phase)))

    def _run_in_shard(
        self, planned: Planned, size: int, known: Values, values: Values, shard_place: ShardPlace, done: Done
    ) -> None:
        whole, start = planned.equation.whole, shard_place.row
        if is_marked(whole, REPLICA):
            values[whole.outvars[0]] = shard_place.replica.astype(get_dtype(whole.outvars[0]))
            return
        twins = self._find_twins(size)
        shard = twins.equations[self._places[id(whole)]].shard
        bases = {merge.base: merge.operation for merge in planned.merges if merge is not None}
        beside = [values[variable] for variable in list_variables(whole.invars) if variable in values]
        operands: list[Array] = []
        for place, (atom, own) in enumerate(zip(whole.invars, shard.invars, strict=True)):
            layout = planned.layouts[place] if planned.layouts else None
            if place in bases:  # combined with the total once, in `_collect`, and not by each shard
                operands.append(make_identity(bases[place], jnp.zeros(get_shape(own), get_dtype(own))))
            elif isinstance(atom, core.Literal):
                operands.append(own.val if planned.counts_locally and isinstance(own, core.Literal) else atom.val)
            elif planned.counts_locally and atom in self.analysis.totals:  # a cotangent of all rows: its share by rows
                operands.append((known[atom] * (size / self.analysis.twins.rows)).astype(get_dtype(own)))
            elif planned.counts_locally and atom in twins.own_constants:
                operands.append(jnp.asarray(twins.own_constants[atom]))
            elif atom in values:
                operands.append(values[atom])
            else:
                value = self._read(atom, known, beside)
                operands.append(value if layout is None else take_part(value, layout, self.analysis.twins.rows, start, size))
        key = id(shard), tuple(map(identify, operands))
        if key in done:  # by the equation that this one copies
            results = done[key][1]
        elif planned.equation.name in DRAWS and not any(planned.layouts):
            results = [DRAWS[planned.equation.name](planned.equation, operands, start, get_shape(shard.outvars[0]))]
        else:
            results = bind(shard, operands)
        done[key] = operands, results  # operands are kept alive, so that no other one gets their id
        values.update(zip(whole.outvars, results, strict=True))

    def spread(self, number: int, size: int, result: ShardResult, place: ShardPlace) -> list[Array]:
        """Build what a shard of `size` rows adds to a phase's sums.

        Parts of sums are added as they are. Rows, and parts that are not to be added, lie at the shard's place among zeros, as
        words: the sum of all shards then has each bit of them.
        """
        phase, total = self.phases[number], self.analysis.twins.rows
        added: list[Array] = []
        for merge, part in zip(phase.merged.values(), result.merged, strict=True):
            if merge.operation == "sum":
                added.append(widen(part))
            else:
                words = to_words(part)[None]
                added.append(put_part(words, Layout(0), len(self.sizes), place.number))
        for variable, part in zip(phase.gathered, result.gathered, strict=True):
            added.append(put_part(to_words(part), self._layout_of(variable), total, place.row))
        for variable, part in zip(phase.left, result.left, strict=True):
            added.append(widen(part) if self.analysis.left[variable] else widen(part) * (size / total))
        return added

    def _collect(self, number: int, totals: Sequence[Array], known: Values) -> Values:
        """Read the values of a phase from the sums over all shards."""
        phase = self.phases[number]
        left_over = iter(totals)
        values: Values = {}
        for variable, merge in phase.merged.items():
            total, like = next(left_over), get_type(variable)
            if merge.operation != "sum":
                total = combine(merge.operation, [from_words(words, like) for words in total])
            base = self._bases.get(variable)
            total = total.astype(get_dtype(variable))
            if base is not None:
                total = self._assembly.hold_for(base, total)
                total = OPERATIONS[merge.operation](self._read(base, known, [total]), total)
            values[variable] = total
        for variable in phase.gathered:
            values[variable] = from_words(next(left_over), get_type(variable))
        for variable in phase.left:
            values[variable] = next(left_over).astype(get_dtype(variable))
        return {variable: self._assembly.hold(variable, value) for variable, value in values.items()}

    def _layout_of(self, variable: core.Var) -> Layout:
        kind = self.analysis.kinds[variable]
        assert isinstance(kind, Rows)  # it has a place in the batch
        return kind.layout

    def join(self, variable: core.Var, parts: Sequence[Array]) -> Array:
        """Join the rows of all shards to one array."""
        return join_parts(parts, self._layout_of(variable))


def identify(operand: Array) -> Hashable:
    """The identity of an operand. A traced one is itself, a number is its value."""
    return id(operand) if isinstance(operand, jax.Array) else (str(np.asarray(operand).dtype), np.asarray(operand).tobytes())


def list_results(phase: Phase) -> tuple[Iterable[core.Var], ...]:
    """The variables of a `ShardResult`."""
    return phase.merged, phase.gathered, phase.left, phase.outputs, phase.kept


def describe_array(shape: Shape, variable: core.Var) -> PyTree:
    """Describe an array by its shape and the dtype of a variable."""
    return jax.ShapeDtypeStruct(shape, get_type(variable).dtype)
