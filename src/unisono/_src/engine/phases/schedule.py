"""The schedule of a step: values are assigned to phases.

A merge is made as late as it can be: what only the end of the step reads is merged in the last phase, so that a phase for the
counts of masks does not run the model. Rows are computed again in each phase that needs them, except where a maximum or a minimum
was taken of them: code compares them with it, and two programs may round them in two ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jax.extend import core

from unisono._src.engine.phases.analysis import Analysis
from unisono._src.engine.phases.kinds import Everywhere, Local, Merge, Rows
from unisono._src.engine.phases.twins import Planned
from unisono._src.programs.operands import Atom, list_variables

COMPARING = ("max", "min")


@dataclasses.dataclass
class Phase:
    """What shards do between two merges."""

    merged: dict[core.Var, Merge]
    gathered: list[core.Var]
    left: list[core.Var]
    """Values of replicas that are read outside of their layers."""
    outputs: list[core.Var]
    """Rows that the step returns."""
    kept: list[core.Var]
    """Rows that the shard itself keeps for later phases."""
    uses: list[core.Var]
    """Rows that it has kept."""
    plan: list[Planned]
    """What shards compute, in order. First come their parts of values that grow with the rows and are the same everywhere."""
    reads: list[core.Var]
    """Values that are the same everywhere, and those that have left their layers."""


@dataclasses.dataclass
class Walk:
    """What a backward walk from the results of a phase has found."""

    wanted: set[Atom]
    plan: list[Planned] = dataclasses.field(default_factory=list[Planned])
    parts: dict[core.Var, Planned] = dataclasses.field(default_factory=dict[core.Var, Planned])
    reads: dict[core.Var, None] = dataclasses.field(default_factory=dict[core.Var, None])
    uses: dict[core.Var, None] = dataclasses.field(default_factory=dict[core.Var, None])


class Schedule:
    """The phases of an analysed step, and what is computed between them."""

    def __init__(self, analysis: Analysis, keeps_rows: bool) -> None:
        """Plan all phases.

        With `keeps_rows`, rows that the step returns along a first axis stay on the shards; others are gathered.
        """
        self._analysis = analysis
        self._keeps_rows = keeps_rows
        self._due: dict[core.Var, int] = {}
        """The first phase in which shards need a value. A value that is the same everywhere is known before it."""
        self._handed_on: dict[core.Var, int] = {}
        """The phase at whose end rows are gathered, or a replica's own value is merged."""
        self._set_due()
        self._kept_in = self._find_kept()
        self.phases = [self._plan_phase(number) for number in range(analysis.phases)]
        for number, phase in enumerate(self.phases):
            later = {variable for other in self.phases[number + 1 :] for variable in other.uses}
            phase.kept = [variable for variable in phase.kept if variable in later]
        self.everywhere = [self._list_everywhere(number) for number in range(analysis.phases + 1)]
        """What is computed everywhere before each phase; the last item is the end of the step."""
        self.bases = {
            variable: planned.equation.whole.invars[merge.base]
            for planned in analysis.plan
            for variable, merge in zip(planned.equation.whole.outvars, planned.merges, strict=False)
            if merge is not None and merge.base is not None
        }
        """What is combined with a merged value once, and not by each shard, as the array that parts are scattered into."""

    def _set_due(self) -> None:
        """Walk back from the outputs, and note when each value is due."""
        analysis, last = self._analysis, self._analysis.phases
        for variable in list_variables(analysis.twins.outputs):
            if self.stays(variable):
                self._due[variable] = last - 1
                continue
            self._need(variable, last, last - 1)
            if isinstance(analysis.kinds[variable], Rows):
                self._hand_on(variable, last - 1)
        for planned in reversed(analysis.plan):
            outputs = [variable for variable in planned.equation.whole.outvars if variable in self._due]
            if not (outputs or planned.equation.whole.effects):
                continue
            if planned.in_shards:
                phase = min((self._due[v] - isinstance(analysis.kinds[v], Everywhere) for v in outputs), default=last - 1)
                for variable in self._list_operands(planned):
                    self._need_in_shards(variable, phase, planned)
            else:
                due = min((self._due[variable] for variable in outputs), default=last)
                for variable in self._list_operands(planned):
                    self._need(variable, due, due - 1)
                    if isinstance(analysis.kinds[variable], Rows):
                        self._hand_on(variable, due - 1)

    def _list_operands(self, planned: Planned) -> list[core.Var]:
        """List the variables of an equation. In place of values that are put together there are those that they are made of."""
        return list(self._analysis.assembly.list_sources(list_variables(planned.equation.whole.invars)))

    def stays(self, variable: core.Var) -> bool:
        """Whether a result of the step stays on the shards.

        This holds for what replicas return, and for rows along the first axis, in their order.
        """
        kind = self._analysis.kinds[variable]
        if variable in self._analysis.returned:
            return True
        return self._keeps_rows and isinstance(kind, Rows) and (kind.layout.axis, kind.layout.outer) == (0, 1)

    def _need(self, variable: core.Var, due: int, phase: int) -> None:
        """Note that a value is read before the phase `due`. Rows and values of replicas must be computed in `phase`."""
        kind = self._analysis.kinds[variable]
        when = due if isinstance(kind, Everywhere) else phase
        self._due[variable] = min(self._due.get(variable, when), when)
        if isinstance(kind, Local):
            self._hand_on(variable, phase)

    def _hand_on(self, variable: core.Var, phase: int) -> None:
        self._handed_on[variable] = min(self._handed_on.get(variable, phase), phase)

    def _need_in_shards(self, variable: core.Var, phase: int, planned: Planned) -> None:
        kind = self._analysis.kinds[variable]
        if isinstance(kind, Local) and not planned.inside:
            self._need(variable, phase, phase - 1)
        else:
            self._due[variable] = min(self._due.get(variable, phase), phase)
        for operand in self._list_sources(variable):
            self._due[operand] = min(self._due.get(operand, phase), phase)

    def _list_sources(self, variable: core.Var) -> Iterator[core.Var]:
        """Yield all that a shard needs to compute its own part. The value is the same everywhere and grows with the rows."""
        part = self._analysis.own_parts.get(variable)
        for operand in list_variables(part.equation.whole.invars) if part is not None else ():
            yield operand
            yield from self._list_sources(operand)

    def _find_kept(self) -> dict[core.Var, int]:
        """Find rows that later phases need exactly, and who keeps them.

        A maximum or a minimum is taken of them. Each has the phase that keeps it.
        """
        kept: dict[core.Var, int] = {}
        for planned in self._analysis.plan:
            for variable, merge in zip(planned.equation.whole.outvars, planned.merges, strict=False):
                if merge is not None and merge.operation in COMPARING and variable in self._due:
                    for operand in list_variables(planned.equation.whole.invars):
                        if isinstance(self._analysis.kinds[operand], Rows):
                            kept[operand] = min(kept.get(operand, self._due[variable]), self._due[variable] - 1)
        return kept

    def _plan_phase(self, number: int) -> Phase:
        analysis = self._analysis
        merged = {
            variable: merge
            for planned in analysis.plan
            for variable, merge in zip(planned.equation.whole.outvars, planned.merges, strict=False)
            if merge is not None and self._due.get(variable) == number + 1
        }
        handed_on = [variable for variable, phase in self._handed_on.items() if phase == number]
        gathered = [variable for variable in handed_on if isinstance(analysis.kinds[variable], Rows)]
        left = [variable for variable in handed_on if isinstance(analysis.kinds[variable], Local)]
        of_step = list(dict.fromkeys(list_variables(analysis.twins.outputs)))
        outputs = [variable for variable in of_step if number == analysis.phases - 1 and self.stays(variable)]
        kept = [variable for variable, phase in self._kept_in.items() if phase == number]
        walk = Walk(wanted={*merged, *gathered, *left, *outputs})
        for planned in reversed(analysis.plan):
            is_effect = number == analysis.phases - 1 and planned.equation.whole.effects
            if planned.in_shards and (is_effect or not walk.wanted.isdisjoint(planned.equation.whole.outvars)):
                walk.plan.append(planned)
                self._sort_operands(planned, number, walk)
        plan = [*walk.parts.values(), *reversed(walk.plan)]
        return Phase(merged, gathered, left, outputs, kept, list(walk.uses), plan, list(walk.reads))

    def _sort_operands(self, planned: Planned, number: int, walk: Walk) -> None:
        """Sort the operands of an equation: computed, read, or kept."""
        bases = {merge.base for merge in planned.merges if merge is not None}
        for place, atom in enumerate(planned.equation.whole.invars):
            if isinstance(atom, core.Literal) or place in bases:
                continue
            kind = self._analysis.kinds[atom]
            grows = bool(planned.layouts) and planned.layouts[place] is not None
            if isinstance(kind, Rows) and self._handed_on.get(atom, number) < number:
                walk.reads[atom] = None
            elif isinstance(kind, Rows) and self._kept_in.get(atom, number) < number:
                walk.uses[atom] = None
            elif isinstance(kind, Rows) or (isinstance(kind, Local) and planned.inside):
                walk.wanted.add(atom)
            elif grows and atom in self._analysis.own_parts:
                self._sort_operands(self._analysis.own_parts[atom], number, walk)
                walk.parts.setdefault(atom, self._analysis.own_parts[atom])
            else:
                walk.reads |= dict.fromkeys(self._analysis.assembly.list_sources([atom]))

    def _list_everywhere(self, number: int) -> list[Planned]:
        return [planned for planned in self._analysis.plan if not planned.in_shards and number in self._list_due(planned)]

    def _list_due(self, planned: Planned) -> list[int | None]:
        """List when an equation is due. One without results, such as a print, is due at the end of the step."""
        due = [self._due.get(variable) for variable in planned.equation.whole.outvars]
        return due or [self._analysis.phases] * bool(planned.equation.whole.effects)

    def list_carries(self) -> list[list[core.Var]]:
        """List the values of each stage that are read later. A stage comes before each phase, and the last before the end."""
        outputs = [v for v in list_variables(self._analysis.twins.outputs) if v not in self.phases[-1].outputs]
        wanted = dict.fromkeys(outputs)
        carries: list[list[core.Var]] = []
        for stage in reversed(range(len(self.everywhere))):
            if stage < len(self.phases):
                phase = self.phases[stage]
                wanted |= dict.fromkeys(phase.reads)
                wanted |= dict.fromkeys(list_variables(self.bases[v] for v in phase.merged if v in self.bases))
            made = [v for planned in self.everywhere[stage] for v in planned.equation.whole.outvars]
            if stage:
                before = self.phases[stage - 1]
                made = [*before.merged, *before.gathered, *before.left, *made]
            carries.append([variable for variable in dict.fromkeys(made) if variable in wanted])
            wanted |= dict.fromkeys(v for planned in self.everywhere[stage] for v in self._list_operands(planned))
        return carries[::-1]
