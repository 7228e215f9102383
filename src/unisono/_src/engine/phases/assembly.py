"""How a step reads frozen values: weights that it leaves as they are, and large values made of them.

A frozen weight may lie cut over devices. It then takes memory while an equation reads it, and not for the whole step: it is put together
for each equation of each shard that reads it. So is what is computed of such a weight alone, as its transpose or its sum with an adapter.
It is computed again for each reader.

Where a frozen value lies must not show in the bits. So what is read beside it, and what is made of it, is held wherever it lies: XLA fuses it
with none of its readers, and so rounds alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import jax
from jax.extend import core

from unisono._src.engine.phases.twins import Planned
from unisono._src.programs.operands import Atom, count_bytes, get_shape, get_type, list_variables
from unisono._src.programs.private.jaxprs import bind
from unisono._src.typing import Array


class FrozenCalls(NamedTuple):
    """How a program reads frozen values. The last argument of each are arrays that come before."""

    put_together: Callable[[Array, jax.ShapeDtypeStruct, Sequence[Array]], Array]
    """(what stands for a cut array, its shape and dtype) to the whole array."""
    come_after: Callable[[Array, Sequence[Array]], Array]
    """An array to the same array. XLA knows nothing of how it was made, and keeps nothing that is made of it for other readers."""

    def hold(self, array: Array) -> Array:
        """Hold an array: XLA fuses it with none of its readers."""
        return self.come_after(array, [])


SMALL = 8
"""A value that has so many times fewer bytes than what it is made of, or made for, is not frozen."""


class Assembly:
    """The frozen values of a step."""

    def __init__(self, plan: Sequence[Planned], frozen: Set[core.Var], cut: Set[core.Var], calls: FrozenCalls | None) -> None:
        """Find the frozen values in the plan of a step.

        Args:
            plan: The equations of the step.
            frozen: Its inputs that are frozen.
            cut: Those of them that lie cut over devices.
            calls: How they are read. None where no input is frozen.
        """
        self._calls = calls
        self._frozen = frozen
        self._cut = cut
        self._made_by: dict[core.Var, Planned] = {}
        everywhere = [planned for planned in plan if not planned.in_shards] if frozen else []
        pure = [planned for planned in everywhere if not planned.equation.whole.effects]
        for planned in pure:
            operands = [v for v in list_variables(planned.equation.whole.invars) if v in self]
            self._add(planned, max(map(count_bytes, operands), default=0))
        read_for: dict[core.Var, int] = {}
        """The bytes of a value that is made of a weight, by its operands."""
        for planned in reversed(pure):  # what is added to a weight, as the product of an adapter's narrow matrices
            results = planned.equation.whole.outvars
            self._add(planned, max((read_for[v] for v in results if v in read_for), default=0))
            if results and results[0] in self._made_by:
                largest = max(map(count_bytes, results))
                read_for |= dict.fromkeys(list_variables(planned.equation.whole.invars), largest)
        self._again: set[core.Var] = set()
        """What is made of weights that lie cut: it is computed again for each reader."""
        for planned in pure:
            whole = planned.equation.whole
            if any(map(self._is_apart, whole.invars)):
                self._again.update(made for made in whole.outvars if made in self._made_by)
        self._held: set[core.Var] = set()
        """What is computed everywhere and held: what equations that read or make frozen values read beside them, and their results."""
        for planned in everywhere:
            whole = planned.equation.whole
            if self.is_read_by(planned) or any(made in self._made_by for made in whole.outvars):
                self._held.update([*list_variables(whole.invars), *whole.outvars])

    def _add(self, planned: Planned, largest: int) -> None:
        """Count the results of an equation as frozen if they are not small. What it is computed of or for has `largest` bytes."""
        results = planned.equation.whole.outvars
        if SMALL * max(map(count_bytes, results)) > largest > 0:
            self._made_by |= dict.fromkeys(results, planned)

    def __contains__(self, atom: Atom) -> bool:
        return isinstance(atom, core.Var) and (atom in self._frozen or atom in self._made_by)

    def _is_apart(self, atom: Atom) -> bool:
        """Whether a value is put together for each of its readers."""
        return isinstance(atom, core.Var) and (atom in self._cut or atom in self._again)

    def is_read_by(self, planned: Planned) -> bool:
        """Whether an equation reads a frozen value."""
        return any(atom in self for atom in planned.equation.whole.invars)

    def list_sources(self, variables: Sequence[core.Var]) -> Iterator[core.Var]:
        """Yield what has to be known for variables to be read, in their place."""
        for variable in variables:
            if variable in self._again:
                yield from self.list_sources(list_variables(self._made_by[variable].equation.whole.invars))
            else:
                yield variable

    def hold(self, variable: core.Var, value: Array) -> Array:
        """Hold a value that is computed everywhere, if it is one of those."""
        return self._calls.hold(value) if self._calls and variable in self._held else value

    def hold_for(self, atom: Atom, value: Array) -> Array:
        """Hold a value that is read beside another one, if that is frozen."""
        return self._calls.hold(value) if self._calls and atom in self else value

    def hold_beside(self, planned: Planned, values: dict[core.Var, Array], done: set[core.Var]) -> None:
        """Hold the values of a shard that an equation reads beside frozen ones. `done` are those that have been held."""
        if self._calls and self.is_read_by(planned):
            beside = [v for v in list_variables(planned.equation.whole.invars) if v in values and v not in done]
            values |= {variable: self._calls.hold(values[variable]) for variable in beside}
            done.update(beside)

    def read(self, variable: core.Var, known: Mapping[core.Var, Array], after: Sequence[Array]) -> Array:
        """Read a value for an equation, which has the arrays `after` beside it. Nothing is put together before they are there."""
        calls = self._calls
        if calls is None:
            return known[variable]
        if variable in self._cut:
            like = jax.ShapeDtypeStruct(get_shape(variable), get_type(variable).dtype)
            return calls.put_together(known[variable], like, after)
        if variable not in self._again:
            return known[variable]
        values = {
            source: self.read(source, known, after) if source in self._cut else calls.come_after(known[source], after)
            for source in self.list_sources([variable])
        }
        return self._compute(variable, values, calls)

    def _compute(self, variable: core.Var, values: dict[core.Var, Array], calls: FrozenCalls) -> Array:
        """Compute a value of what it is made of. `values` keeps what is computed on the way."""
        if variable not in values:
            whole = self._made_by[variable].equation.whole
            operands = [a.val if isinstance(a, core.Literal) else self._compute(a, values, calls) for a in whole.invars]
            values.update(zip(whole.outvars, map(calls.hold, bind(whole, operands)), strict=True))
        return values[variable]
