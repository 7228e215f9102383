"""The analysis of a step: the kind of each value, and where each equation is computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from jax.extend import core

from unisono._src.operands import Atom, get_shape, list_variables
from unisono._src.phases.deferral import defer_merges
from unisono._src.phases.draws import can_draw
from unisono._src.phases.kinds import Everywhere, Kind, Layout, Local, Merge, Rows
from unisono._src.phases.planned import Planned
from unisono._src.phases.rules.loops import apply_rule
from unisono._src.phases.twins import Equation, Twins

IsLocal: TypeAlias = Callable[[str], bool]
"""Says of the scopes of an equation whether it is in a layer that normalizes the rows of its replica by themselves."""


class Analysis:
    """What a step's program says of each of its values."""

    def __init__(self, twins: Twins, has_rows: Sequence[bool], is_local: IsLocal = lambda _: False) -> None:
        """`has_rows` says which inputs are rows of the batch, along their first axis."""
        self.twins = twins
        self._is_local = is_local
        self.kinds: dict[core.Var, Kind] = dict.fromkeys(twins.constants, Everywhere())
        self.kinds |= {v: Rows(Layout(0)) if rows else Everywhere() for v, rows in zip(twins.inputs, has_rows, strict=True)}
        self.own_parts: dict[core.Var, Planned] = {}
        """Values that are the same everywhere and grow with the rows, of which shards can compute their part by themselves."""
        self.left: dict[core.Var, bool] = {}
        """A replica's own values that are read outside of its layer: whether their parts are added. Else they are averaged by rows."""
        self.gathered: dict[core.Var, Equation] = {}
        """Rows that are gathered, and the first equation that wants them so."""
        self._stays_local = find_local_reductions(twins, is_local)
        self._made_by = {variable: equation for equation in twins.equations for variable in equation.whole.outvars}
        self.plan = [self._classify(equation) for equation in twins.equations]
        self.plan = defer_merges(twins, self.plan, self.kinds)
        for atom in twins.outputs:
            if isinstance(self.kind_of(atom), Local):
                self._leave(atom)
        self.phases = self._count_phases()

    def _count_phases(self) -> int:
        """Return the largest level of what the outputs are made of."""
        read = set(list_variables(self.twins.outputs))
        for planned in reversed(self.plan):
            if not read.isdisjoint(planned.equation.whole.outvars):
                read.update(list_variables(planned.equation.whole.invars))
        kinds = [self.kinds[variable] for variable in read]
        return max([1, *(kind.level for kind in kinds if isinstance(kind, Everywhere))])

    def kind_of(self, atom: Atom) -> Kind:
        return Everywhere() if isinstance(atom, core.Literal) else self.kinds[atom]

    def _leave(self, atom: Atom) -> Kind:
        """Return the kind of a replica's own value outside of its layer: cotangents are parts of a sum, statistics are averaged."""
        assert isinstance(atom, core.Var)  # a literal is no replica's own
        self.left[atom] = "transpose" in self._made_by[atom].layer
        return Everywhere(self.kinds[atom].level + 1)

    def _classify(self, equation: Equation) -> Planned:
        inside = self._is_local(equation.layer)
        kinds = [self.kind_of(atom) for atom in equation.whole.invars]
        if not inside:
            kinds = [self._leave(a) if isinstance(k, Local) else k for a, k in zip(equation.whole.invars, kinds, strict=True)]
        level = max((kind.level for kind in kinds), default=0)
        if not equation.whole.outvars:
            return self._plan_effect(equation, kinds)
        has_local = any(isinstance(kind, Local) for kind in kinds)
        if not any(isinstance(kind, Rows) for kind in kinds):
            if not has_local and not (inside and counts_rows(equation)):
                return self._plan_everywhere(equation, level)
            return self._plan_local(equation, level)
        layouts = self._place_operands(equation, kinds)
        is_kept = id(equation.whole) in self._stays_local
        outcomes = None if layouts is None else apply_rule(self.twins, equation, layouts)
        if outcomes is None and is_kept:
            outcomes = [None] * len(equation.whole.outvars)
        if layouts is None or outcomes is None:
            return self._plan_gathered(equation, kinds)
        merges: list[Merge | None] = []
        for variable, outcome in zip(equation.whole.outvars, outcomes, strict=True):
            if isinstance(outcome, Layout):
                self.kinds[variable] = Rows(outcome, level)
            elif is_kept:
                self.kinds[variable] = Local(level)
            else:
                self.kinds[variable] = Everywhere(level + 1)
            is_merged = isinstance(self.kinds[variable], Everywhere)
            merges.append((outcome if isinstance(outcome, Merge) else Merge("max")) if is_merged else None)
        return Planned(equation, True, layouts, merges, inside, has_local)

    def _plan_effect(self, equation: Equation, kinds: Sequence[Kind]) -> Planned:
        """Plan an equation that makes nothing, as a print: of rows in the shards, of other values once."""
        layouts = self._place_operands(equation, kinds) if any(isinstance(kind, Rows) for kind in kinds) else None
        return self._plan_gathered(equation, kinds) if layouts is None else Planned(equation, True, layouts)

    def _place_operands(self, equation: Equation, kinds: Sequence[Kind]) -> list[Layout | None] | None:
        """Return where the operands have rows. What is the same everywhere and grows has them as the rows that it meets.

        None where an operand grows along several axes, or in steps of its own.
        """
        rows = [kind.layout for kind in kinds if isinstance(kind, Rows)]
        layouts: list[Layout | None] = []
        for atom, kind in zip(equation.whole.invars, kinds, strict=True):
            growing = self.twins.find_growing(atom)
            if isinstance(kind, Rows):
                layouts.append(kind.layout)
            elif not growing:
                layouts.append(None)
            else:
                layout = self._find_layout(atom, growing[0], rows)
                if not self.twins.fits(atom, layout):
                    return None
                layouts.append(layout)
        return layouts

    def _find_layout(self, atom: Atom, axis: int, rows: Sequence[Layout]) -> Layout:
        """Return the layout by which shards take their part of a value that is the same everywhere."""
        per_row = get_shape(atom)[axis] // self.twins.rows
        same = [layout for layout in rows if layout.per_row == per_row]
        return same[0].at(axis) if same else Layout(axis, 1, per_row)

    def _plan_everywhere(self, equation: Equation, level: int) -> Planned:
        self.kinds |= dict.fromkeys(equation.whole.outvars, Everywhere(level))
        self._note_own_part(equation)
        return Planned(equation, False)

    def _note_own_part(self, equation: Equation) -> None:
        """Note that shards can compute their part of what an equation makes, where each part is made of parts."""
        (variable, *others) = equation.whole.outvars
        growing = self.twins.find_growing(variable)
        if others or len(growing) != 1 or not self.twins.fits(variable, Layout(growing[0])):
            return
        layouts: list[Layout | None] = []
        for atom in equation.whole.invars:
            axes = self.twins.find_growing(atom)
            if axes and (len(axes) > 1 or atom not in self.own_parts):
                return
            layouts.append(Layout(axes[0]) if axes else None)
        if any(layouts):
            outcomes = apply_rule(self.twins, equation, layouts)
            is_part = outcomes is not None and outcomes[0] == Layout(growing[0])
        else:
            is_part = equation.name == "broadcast_in_dim" or can_draw(equation)
        if is_part:
            self.own_parts[variable] = Planned(equation, True, layouts, [None])

    def _plan_local(self, equation: Equation, level: int) -> Planned:
        """Plan an equation on a replica's own values, or on its number of rows."""
        for variable in equation.whole.outvars:
            growing = self.twins.find_growing(variable)
            layout = Layout(growing[0], 1, get_shape(variable)[growing[0]] // self.twins.rows) if growing else None
            self.kinds[variable] = Local(level) if layout is None else Rows(layout, level)
        layouts = self._place_operands(equation, [self.kind_of(atom) for atom in equation.whole.invars])
        return Planned(equation, True, layouts or (), [None] * len(equation.whole.outvars), True, True)

    def _plan_gathered(self, equation: Equation, kinds: Sequence[Kind]) -> Planned:
        """Plan an equation without a rule: on all rows, as traced for the whole batch. It waits for the exchange of its rows alone."""
        for atom, kind in zip(equation.whole.invars, kinds, strict=True):
            if isinstance(kind, Rows):
                assert isinstance(atom, core.Var)  # a literal has no rows
                self.gathered.setdefault(atom, equation)
            elif isinstance(self.kind_of(atom), Local):
                self._leave(atom)
        level = max(kind.level + (not isinstance(kind, Everywhere)) for kind in kinds)
        self.kinds |= dict.fromkeys(equation.whole.outvars, Everywhere(level))
        return Planned(equation, False)


def counts_rows(equation: Equation) -> bool:
    """Return whether a literal of the equation depends on the number of rows."""
    pairs = zip(equation.whole.invars, equation.shard.invars, strict=True)
    return any(
        np.any(one.val != other.val) for one, other in pairs if isinstance(one, core.Literal) and isinstance(other, core.Literal)
    )


def find_local_reductions(twins: Twins, is_local: IsLocal) -> set[int]:
    """Return the ids of the reductions in layers of a replica's own that flow back into rows of these layers."""
    reaches_rows: dict[Atom, bool] = {}
    found: set[int] = set()
    for equation in reversed(twins.equations):
        if not is_local(equation.layer):
            continue
        makes_rows = any(twins.find_growing(variable) for variable in equation.whole.outvars)
        flows = makes_rows or any(reaches_rows.get(variable, False) for variable in equation.whole.outvars)
        for atom in equation.whole.invars:
            if isinstance(atom, core.Var):
                reaches_rows[atom] = reaches_rows.get(atom, False) or flows
        if flows and not makes_rows:
            found.add(id(equation.whole))
    return found


def match_scopes(pattern: str) -> IsLocal:
    """Return what says whether a scope of an equation matches a pattern."""
    return lambda scopes: re.search(pattern, scopes) is not None
