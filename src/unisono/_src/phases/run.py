"""The functions of a step in phases: what a shard computes, how shards' results become one, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from unisono._src.jax_private.jaxprs import bind
from unisono._src.operands import Atom, get_dtype, get_shape, list_variables
from unisono._src.phases.analysis import Analysis, Planned
from unisono._src.phases.combine import OPERATIONS, combine, make_identity
from unisono._src.phases.draws import DRAWS
from unisono._src.phases.kinds import Layout, Rows
from unisono._src.phases.schedule import Phase, Schedule
from unisono._src.phases.twins import Twins, check_sizes
from unisono._src.typing import Array

Values: TypeAlias = dict[core.Var, Array]


class ShardResult(NamedTuple):
    """The values that a shard hands on at the end of a phase, in the order of the lists of `Phase`."""

    merged: list[Array]
    gathered: list[Array]
    left: list[Array]
    outputs: list[Array]
    kept: list[Array]


class PhasedStep:
    """An analysed step as pure functions."""

    def __init__(self, analysis: Analysis, twins: Iterable[Twins]) -> None:
        """`twins` are those of each size of a shard."""
        self.analysis = analysis
        schedule = Schedule(analysis)
        self.phases = schedule.phases
        self._everywhere = schedule.everywhere
        self._rows = [variable for variable in analysis.twins.inputs if isinstance(analysis.kinds[variable], Rows)]
        self._places = {id(equation.whole): place for place, equation in enumerate(analysis.twins.equations)}
        self._twins = {one.shard_rows: one for one in twins}
        for one in self._twins.values():
            check_sizes(one, {v: kind.layout for v, kind in analysis.kinds.items() if isinstance(kind, Rows)})
        self._bases = {
            variable: planned.equation.whole.invars[merge.base]
            for planned in analysis.plan
            for variable, merge in zip(planned.equation.whole.outvars, planned.merges, strict=False)
            if merge is not None and merge.base is not None
        }
        self.reads, self.makes = self._list_reads_and_makes()
        """For each stage of what is computed everywhere: the values that it reads, and those that are read later."""

    def _list_reads_and_makes(self) -> tuple[list[list[core.Var]], list[list[core.Var]]]:
        wanted = dict.fromkeys(list_variables(self.analysis.twins.outputs))
        all_reads: list[list[core.Var]] = []
        all_makes: list[list[core.Var]] = []
        for stage in reversed(range(len(self._everywhere))):
            if stage < len(self.phases):
                wanted |= dict.fromkeys(self.phases[stage].reads)
                wanted |= dict.fromkeys(list_variables(self._bases[v] for v in self.phases[stage].merged if v in self._bases))
            made = dict.fromkeys(v for planned in self._everywhere[stage] for v in planned.equation.whole.outvars)
            read = [
                v for planned in self._everywhere[stage] for v in list_variables(planned.equation.whole.invars) if v not in made
            ]
            all_makes.append([variable for variable in made if variable in wanted])
            all_reads.append(list(dict.fromkeys(read)))
            wanted |= dict.fromkeys(read)
        return all_reads[::-1], all_makes[::-1]

    def run_everywhere(self, stage: int, reads: Sequence[Array]) -> list[Array]:
        """Compute what is the same everywhere and due before a phase, or at the end of the step, from `self.reads[stage]`."""
        values: Values = dict(zip(self.reads[stage], reads, strict=True))
        for planned in self._everywhere[stage]:
            whole = planned.equation.whole
            operands = [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in whole.invars]
            values.update(zip(whole.outvars, bind(whole, operands), strict=True))
        return [values[variable] for variable in self.makes[stage]]

    def run_shard(
        self, number: int, size: int, reads: Sequence[Array], rows: Sequence[Array], kept: Sequence[Array], start: Array
    ) -> ShardResult:
        """Compute a phase on a shard of `size` rows, which begins with row `start`, from the phase's reads and what the shard has kept."""
        phase = self.phases[number]
        known: Values = dict(zip(phase.reads, reads, strict=True))
        values: Values = dict(zip(self._rows, rows, strict=True)) | dict(zip(phase.uses, kept, strict=True))
        for variable in phase.reads:
            kind = self.analysis.kinds[variable]
            if isinstance(kind, Rows):  # gathered before
                values[variable] = take_part(known[variable], kind.layout, self.analysis.twins.rows, start, size)
        for planned in phase.plan:
            self._run_in_shard(planned, size, known, values, start)
            for variable in planned.equation.whole.outvars:
                if variable in phase.kept:  # what is kept must be what its maximum was taken of: no fusion rounds it once more
                    values[variable] = lax.optimization_barrier(values[variable])
        return ShardResult(*([values[variable] for variable in of] for of in list_results(phase)))

    def _run_in_shard(self, planned: Planned, size: int, known: Values, values: Values, start: Array) -> None:
        whole = planned.equation.whole
        shard = self._twins[size].equations[self._places[id(whole)]].shard
        bases = {merge.base: merge.operation for merge in planned.merges if merge is not None}
        operands: list[Array] = []
        for place, (atom, own) in enumerate(zip(whole.invars, shard.invars, strict=True)):
            layout = planned.layouts[place] if planned.layouts else None
            if place in bases:
                operands.append(make_identity(bases[place], jnp.zeros(get_shape(own), get_dtype(own))))
            elif isinstance(atom, core.Literal):
                operands.append(own.val if planned.counts_locally and isinstance(own, core.Literal) else atom.val)
            elif atom in values:
                operands.append(values[atom])
            else:
                value = known[atom]
                operands.append(value if layout is None else take_part(value, layout, self.analysis.twins.rows, start, size))
        if planned.equation.name in DRAWS and not any(planned.layouts):
            results = [DRAWS[planned.equation.name](planned.equation, operands, start, get_shape(shard.outvars[0]))]
        else:
            results = bind(shard, operands)
        values.update(zip(whole.outvars, results, strict=True))

    def merge(self, number: int, results: Sequence[ShardResult], sizes: Sequence[int], known: Values) -> Values:
        """Return the values that all shards together have handed on at the end of a phase."""
        phase = self.phases[number]
        values: Values = {}
        for place, (variable, merge) in enumerate(phase.merged.items()):
            total = combine(merge.operation, [result.merged[place] for result in results])
            base = self._bases.get(variable)
            values[variable] = total if base is None else OPERATIONS[merge.operation](read(base, known), total)
        for place, variable in enumerate(phase.gathered):
            values[variable] = self.join(variable, [result.gathered[place] for result in results])
        for place, variable in enumerate(phase.left):
            is_added = self.analysis.left[variable]
            parts = [r.left[place] * (1 if is_added else size / sum(sizes)) for r, size in zip(results, sizes, strict=True)]
            values[variable] = combine("sum", parts)
        return values

    def join(self, variable: core.Var, parts: Sequence[Array]) -> Array:
        """Return the rows of all shards as one array."""
        kind = self.analysis.kinds[variable]
        assert isinstance(kind, Rows)  # of what is joined
        return join_parts(parts, kind.layout)


def list_results(phase: Phase) -> tuple[Iterable[core.Var], ...]:
    """Return the variables of a `ShardResult`."""
    return phase.merged, phase.gathered, phase.left, phase.outputs, phase.kept


def read(atom: Atom, known: Values) -> Array:
    """Return the value of an operand that is the same everywhere."""
    return jnp.asarray(atom.val) if isinstance(atom, core.Literal) else known[atom]


def take_part(array: Array, layout: Layout, rows: int, start: Array, size: int) -> Array:
    """Return a shard's part of an array that has all rows."""
    axis, shape = layout.axis, array.shape
    if layout.outer == 1:
        return lax.dynamic_slice_in_dim(array, start * layout.inner, size * layout.inner, axis)
    blocks = array.reshape(*shape[:axis], layout.outer, rows, layout.inner, *shape[axis + 1 :])
    return lax.dynamic_slice_in_dim(blocks, start, size, axis + 1).reshape(
        *shape[:axis], layout.per_row * size, *shape[axis + 1 :]
    )


def join_parts(parts: Sequence[Array], layout: Layout) -> Array:
    """Return the rows of all shards as one array."""
    axis, shape = layout.axis, parts[0].shape
    if layout.outer == 1:
        return jnp.concatenate(parts, axis)
    blocks = [part.reshape(*shape[:axis], layout.outer, -1, *shape[axis + 1 :]) for part in parts]
    return jnp.concatenate(blocks, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :])
