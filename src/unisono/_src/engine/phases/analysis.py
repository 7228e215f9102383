"""The analysis of a step: the kind of each value.

It also says where each equation is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from jax.extend import core

from unisono._src.engine.phases.assembly import Assembly, FrozenCalls
from unisono._src.engine.phases.deferral import defer_merges, merge_smallest
from unisono._src.engine.phases.draws import can_draw, is_random
from unisono._src.engine.phases.kinds import Everywhere, Kind, Layout, Local, Merge, Rows
from unisono._src.engine.phases.rules.loops import apply_rule
from unisono._src.engine.phases.twins import Equation, Planned, Twins, has_same_literals
from unisono._src.programs.marks import OUTPUT, REPLICA, SUM, is_in_layer, is_in_replica, is_marked, sees_batch
from unisono._src.programs.operands import Atom, get_dtype, get_shape, list_variables

IsLocal: TypeAlias = Callable[[str], bool]
"""Whether an equation with these scopes is in a layer that normalizes the rows of each replica by themselves."""


class Analysis:
    """What is known of each value of a step."""

    def __init__(
        self,
        twins: Twins,
        inputs: Sequence[Kind],
        shards: int,
        is_local: IsLocal = is_in_layer,
        frozen: Iterable[int] = (),
        cut: Iterable[int] = (),
        frozen_calls: FrozenCalls | None = None,
    ) -> None:
        """Classify all values and equations.

        Args:
            twins: The step's traces for the whole batch and for a shard.
            inputs: The kinds of the inputs.
            shards: The number of shards that have rows.
            is_local: Whether scopes are those of a layer that normalizes the rows of its replica by themselves.
            frozen: The numbers of large inputs that the step leaves as they are.
            cut: Those of them that lie cut over devices.
            frozen_calls: How programs read frozen values.
        """
        self.twins = twins
        self._shards = shards
        self._is_local = is_local
        self.kinds: dict[core.Var, Kind] = dict.fromkeys(twins.constants, Everywhere())
        self.kinds |= zip(twins.inputs, inputs, strict=True)
        self.own_parts: dict[core.Var, Planned] = {}
        """Values that are the same everywhere and grow with the rows. Shards can compute their own parts of them."""
        self.left: dict[core.Var, bool] = {}
        """Whether parts are added, of a replica's own values that are read outside of its layer. Else they are averaged by rows."""
        self.totals: set[core.Var] = set()
        """Cotangents of all rows in layers that see the whole batch in replica code. A replica takes its share of them by rows."""
        self.gathered: dict[core.Var, Equation] = {}
        """Rows that are gathered, and the first equation that wants them so."""
        self._stays_local = find_local_reductions(twins, is_local)
        self._made_by = {variable: equation for equation in twins.equations for variable in equation.whole.outvars}
        self.plan = [self._classify(equation) for equation in twins.equations]
        self.plan = merge_smallest(twins, defer_merges(twins, self.plan, self.kinds), self.kinds)
        frozen_inputs = {twins.inputs[number] for number in frozen}
        self.assembly = Assembly(self.plan, frozen_inputs, {twins.inputs[number] for number in cut}, frozen_calls)
        """The frozen values, and how they are read."""
        self.returned = [v for one in twins.equations if is_marked(one.whole, OUTPUT) for v in one.whole.outvars]
        """The values that each replica returns."""
        for atom in twins.outputs:
            if isinstance(self.kind_of(atom), Local) and atom not in self.returned:
                self._leave(atom)
        self.phases = self._count_phases()

    def _count_phases(self) -> int:
        """Count the phases that the outputs take. It is their largest level, and one more for what stays in the shards."""
        read = set(list_variables(self.twins.outputs))
        for planned in reversed(self.plan):
            if not read.isdisjoint(planned.equation.whole.outvars):
                read.update(list_variables(planned.equation.whole.invars))
        kinds = [self.kinds[variable] for variable in read]
        in_shards = [
            self.kinds[v].level + 1 for v in list_variables(self.twins.outputs) if not isinstance(self.kinds[v], Everywhere)
        ]
        return max([1, *in_shards, *(kind.level for kind in kinds if isinstance(kind, Everywhere))])

    def list_in_shards(self) -> set[int]:
        """List the ids of the equations that shards compute. They are those of the whole batch's trace."""
        return {id(planned.equation.whole) for planned in (*self.plan, *self.own_parts.values()) if planned.in_shards}

    def kind_of(self, atom: Atom) -> Kind:
        return Everywhere() if isinstance(atom, core.Literal) else self.kinds[atom]

    def _leave(self, atom: Atom) -> Kind:
        """Note that a replica's own value is read outside of its layer.

        Cotangents are parts of a sum there; statistics are averaged.
        """
        assert isinstance(atom, core.Var)  # a literal is no replica's own
        self.left[atom] = atom in self._made_by and "transpose" in self._made_by[atom].layer
        return Everywhere(self.kinds[atom].level + 1)

    def _classify(self, equation: Equation) -> Planned:
        if is_marked(equation.whole, REPLICA):
            self.kinds[equation.whole.outvars[0]] = Local()
            return Planned(equation, True, [None], [None], inside=True)
        if is_in_replica(equation.layer) and not self._is_local(equation.layer):
            return self._plan_in_replica(equation)
        planned = self._plan_in_batch(equation)
        if sees_batch(equation.layer) and "transpose" in equation.layer:
            made = [variable for variable in equation.whole.outvars if isinstance(self.kinds[variable], Everywhere)]
            self.totals.update(variable for variable in made if self.kinds[variable].level)
        return planned

    def _plan_in_replica(self, equation: Equation) -> Planned:
        """Plan an equation that each replica computes as traced for its rows. Nothing is merged but what is marked as a sum."""
        kinds = [self.kind_of(atom) for atom in equation.whole.invars]
        level = max((kind.level for kind in kinds), default=0)
        (first, *_) = equation.whole.outvars
        if is_marked(equation.whole, SUM) and not list_variables(equation.whole.invars):
            return self._plan_everywhere(sum_literals(equation, self._shards), level)
        if is_marked(equation.whole, SUM):
            self.kinds[first] = Everywhere(level + 1)
            return Planned(equation, True, self._place_operands(equation, kinds) or (), [Merge()], True, True)
        has_own_constants = not self.twins.own_constants.keys().isdisjoint(list_variables(equation.whole.invars))
        has_totals = not self.totals.isdisjoint(list_variables(equation.whole.invars))
        is_own = has_own_constants or has_totals or any(isinstance(kind, Rows | Local) for kind in kinds)
        if not is_own and not is_marked(equation.whole, OUTPUT):
            grows = not has_same_literals(equation) or any(self.twins.find_growing(made) for made in equation.whole.outvars)
            is_drawn = is_random(equation) or not self.own_parts.keys().isdisjoint(list_variables(equation.whole.invars))
            if is_drawn or not grows:
                return self._plan_everywhere(equation, level)
        layouts = (None if has_own_constants else self._place_operands(equation, kinds)) or [None] * len(kinds)
        outcomes = apply_rule(self.twins, equation, layouts) if any(layouts) else None
        for variable, outcome in zip(equation.whole.outvars, outcomes or [None] * len(equation.whole.outvars), strict=True):
            self.kinds[variable] = Rows(outcome, level) if isinstance(outcome, Layout) else Local(level)
        return Planned(equation, True, layouts, [None] * len(equation.whole.outvars), True, True)

    def _plan_in_batch(self, equation: Equation) -> Planned:
        """Plan an equation of the whole batch.

        A reduction over rows is a merge, except in layers whose statistics are a replica's own.
        """
        counts_batch = sees_batch(equation.layer)
        inside = counts_batch or self._is_local(equation.layer)
        kinds = [self.kind_of(atom) for atom in equation.whole.invars]
        if not inside:
            kinds = [self._leave(a) if isinstance(k, Local) else k for a, k in zip(equation.whole.invars, kinds, strict=True)]
        level = max((kind.level for kind in kinds), default=0)
        if not equation.whole.outvars:
            return self._plan_effect(equation, kinds)
        has_local = any(isinstance(kind, Local) for kind in kinds)
        if not any(isinstance(kind, Rows) for kind in kinds):
            if not has_local and not (inside and not counts_batch and not has_same_literals(equation)):
                return self._plan_everywhere(equation, level)
            return self._plan_local(equation, level, not counts_batch)
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
        return Planned(equation, True, layouts, merges, inside, has_local and not counts_batch)

    def _plan_effect(self, equation: Equation, kinds: Sequence[Kind]) -> Planned:
        """Plan an equation without results, such as a print. Of rows it runs in the shards, of other values once."""
        layouts = self._place_operands(equation, kinds) if any(isinstance(kind, Rows) for kind in kinds) else None
        return self._plan_gathered(equation, kinds) if layouts is None else Planned(equation, True, layouts)

    def _place_operands(self, equation: Equation, kinds: Sequence[Kind]) -> list[Layout | None] | None:
        """Find the layouts of the operands' rows.

        A value that is the same everywhere, and grows with the rows, takes the layout of the rows that it meets. None where an
        operand grows along several axes, or in steps of its own.
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
        """Find the layout by which shards slice a whole value."""
        per_row = get_shape(atom)[axis] // self.twins.rows
        same = [layout for layout in rows if layout.per_row == per_row]
        return same[0].at(axis) if same else Layout(axis, 1, per_row)

    def _plan_everywhere(self, equation: Equation, level: int) -> Planned:
        self.kinds |= dict.fromkeys(equation.whole.outvars, Everywhere(level))
        self._note_own_part(equation)
        return Planned(equation, False)

    def _note_own_part(self, equation: Equation) -> None:
        """Note a value whose part each shard can compute itself. Each part is then made of parts."""
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

    def _plan_local(self, equation: Equation, level: int, counts_locally: bool) -> Planned:
        """Plan an equation on a replica's own values or row count."""
        for variable in equation.whole.outvars:
            growing = self.twins.find_growing(variable)
            layout = Layout(growing[0], 1, get_shape(variable)[growing[0]] // self.twins.rows) if growing else None
            self.kinds[variable] = Local(level) if layout is None else Rows(layout, level)
        layouts = self._place_operands(equation, [self.kind_of(atom) for atom in equation.whole.invars])
        return Planned(equation, True, layouts or (), [None] * len(equation.whole.outvars), True, counts_locally)

    def _plan_gathered(self, equation: Equation, kinds: Sequence[Kind]) -> Planned:
        """Plan an equation without a rule: on all rows, gathered. It waits for the exchange of its rows alone."""
        for atom, kind in zip(equation.whole.invars, kinds, strict=True):
            if isinstance(kind, Rows):
                assert isinstance(atom, core.Var)  # a literal has no rows
                self.gathered.setdefault(atom, equation)
            elif isinstance(self.kind_of(atom), Local):
                self._leave(atom)
        level = max((kind.level + (not isinstance(kind, Everywhere)) for kind in kinds), default=0)
        self.kinds |= dict.fromkeys(equation.whole.outvars, Everywhere(level))
        return Planned(equation, False)


def sum_literals(equation: Equation, shards: int) -> Equation:
    """Replace a summed literal by its sum over the shards. A literal is a constant, or a count of rows."""
    (whole,), (own,) = equation.whole.invars, equation.shard.invars
    assert isinstance(whole, core.Literal)
    assert isinstance(own, core.Literal)
    per_row = (float(whole.val) - float(own.val)) / (equation.rows - equation.shard_rows)
    total = (float(own.val) - per_row * equation.shard_rows) * shards + per_row * equation.rows
    literal = core.Literal(np.asarray(total, get_dtype(whole))[()], whole.aval)
    return equation._replace(whole=equation.whole.replace(invars=[literal]))


def find_local_reductions(twins: Twins, is_local: IsLocal) -> set[int]:
    """Find the ids of the reductions that a replica keeps to itself.

    In layers of its own, these are the reductions that flow back into rows of the layers. In layers that see the whole batch in a
    replica's code, they are those that do not: gradients of weights, which replicas add up.
    """
    reaches_rows: dict[Atom, bool] = {}
    found: set[int] = set()
    for equation in reversed(twins.equations):
        is_own = is_local(equation.layer)
        if not is_own and not sees_batch(equation.layer):
            continue
        makes_rows = any(twins.find_growing(variable) for variable in equation.whole.outvars)
        flows = makes_rows or any(reaches_rows.get(variable, False) for variable in equation.whole.outvars)
        for atom in equation.whole.invars:
            if isinstance(atom, core.Var):
                reaches_rows[atom] = reaches_rows.get(atom, False) or flows
        if flows == is_own and not makes_rows:
            found.add(id(equation.whole))
    return found
