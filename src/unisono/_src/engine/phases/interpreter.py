"""Run a step's phases shard by shard, in one process.

It can tell what each shard contributed to a result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from unisono._src.engine.phases.kinds import Everywhere, combine
from unisono._src.engine.phases.rules.loops import JOINS, MOVES, PRODUCTS
from unisono._src.engine.phases.run import PhasedStep, ShardPlace, ShardResult, Values
from unisono._src.programs.operands import Atom
from unisono._src.programs.private.jaxprs import bind
from unisono._src.typing import Array


class StepRun(NamedTuple):
    """The values of a step that was run."""

    values: Values
    """All values that are the same everywhere."""
    results: list[list[ShardResult]]
    """For each phase and shard."""


def run_shards(phased: PhasedStep, state: Sequence[Array], batch: Sequence[Array]) -> StepRun:
    """Run a step on a batch, by phases and shards. `state` and `batch` are the flat lists of its inputs."""
    values, totals = phased.find_start(state), list[Array]()
    starts = list(itertools.accumulate(phased.sizes, initial=0))
    places = [ShardPlace(jnp.int32(number), jnp.int32(start), jnp.int32(number)) for number, start in enumerate(starts[:-1])]
    kept: list[Values] = [{} for _ in phased.sizes]
    results: list[list[ShardResult]] = []
    for number, phase in enumerate(phased.phases):
        values |= phased.compute_everywhere(number, values, totals)
        of_phase: list[ShardResult] = []
        added: list[list[Array]] = []
        for place, start, size, own in zip(places, starts, phased.sizes, kept, strict=False):
            rows = [array[start : start + size] for array in batch]
            reads, uses = [values[v] for v in phase.reads], [own[v] for v in phase.uses]
            of_phase.append(phased.run_shard(number, size, reads, rows, uses, place))
            added.append(phased.spread(number, size, of_phase[-1], place))
            own |= zip(phase.kept, of_phase[-1].kept, strict=True)
        results.append(of_phase)
        totals = [combine("sum", parts) for parts in zip(*added, strict=True)]
    return StepRun(values | phased.compute_everywhere(len(phased.phases), values, totals), results)


def list_outputs(phased: PhasedStep, run: StepRun) -> list[Array]:
    """List the results of a run. Rows that stayed on the shards are joined."""
    last = phased.phases[-1].outputs
    rows = {
        variable: phased.join(variable, [result.outputs[place] for result in run.results[-1]])
        for place, variable in enumerate(last)
    }
    known = run.values | rows
    return [jnp.asarray(atom.val) if isinstance(atom, core.Literal) else known[atom] for atom in phased.analysis.twins.outputs]


class Shares:
    """One shard's parts of the values of a step. The parts of all shards add up to a value."""

    def __init__(self, phased: PhasedStep, run: StepRun, shard: int) -> None:
        self._phased = phased
        self._run = run
        self._shard = shard
        self._made_by = {v: p for p in phased.analysis.plan if not p.in_shards for v in p.equation.whole.outvars}
        self._known: Values = {}
        for phase, results in zip(phased.phases, run.results, strict=True):
            is_sum = [merge.operation == "sum" and merge.base is None for merge in phase.merged.values()]
            parts = zip(phase.merged, is_sum, results[shard].merged, strict=True)
            self._known |= {variable: part for variable, summed, part in parts if summed}
            self._known |= {v: part for v, part in zip(phase.left, results[shard].left, strict=True) if phased.analysis.left[v]}

    def find(self, atom: Atom) -> Array | None:
        """Find the shard's part of a value. None where the value is no sum of parts."""
        if isinstance(atom, core.Literal):
            return None
        if atom in self._known:
            return self._known[atom]
        planned = self._made_by.get(atom)
        if planned is None:
            return None
        equation = planned.equation
        parts = [self.find(operand) for operand in equation.whole.invars]
        given = [place for place, part in enumerate(parts) if part is not None]
        is_product = len(given) == 1 and given[0] in PRODUCTS.get(equation.name, ())
        if not given or not (equation.name in MOVES or equation.name == "name" or equation.name in JOINS or is_product):
            return None
        operands = [self._fill(*pair, is_product) for pair in zip(equation.whole.invars, parts, strict=True)]
        return None if any(operand is None for operand in operands) else bind(equation.whole, operands)[0]

    def _fill(self, atom: Atom, part: Array | None, is_product: bool) -> Array | None:
        """Complete an operand.

        It is the part, or the other factor of a multiplication, or zeros where no shard has contributed anything.
        """
        if part is not None:
            return part
        value = jnp.asarray(atom.val) if isinstance(atom, core.Literal) else self._run.values[atom]
        if is_product:
            return value
        kind = self._phased.analysis.kind_of(atom)
        return jnp.zeros_like(value) if isinstance(kind, Everywhere) and not kind.level else None
