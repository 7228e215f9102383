"""Values that are put together where they are read: weights that lie cut over devices, and large values made of them.

They take memory while an equation reads them, and not for the whole step: a weight that is not trained is put together for each equation
of each shard that reads it. So is what is computed of such a weight alone, as its transpose or its sum with an adapter. It is computed
again for each reader.
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


class CutCalls(NamedTuple):
    """How a program reads what lies cut. The last argument of each are arrays that come before."""

    put_together: Callable[[Array, jax.ShapeDtypeStruct, Sequence[Array]], Array]
    """(what stands for a cut array, its shape and dtype) to the whole array."""
    come_after: Callable[[Array, Sequence[Array]], Array]
    """An array to the same array. XLA knows nothing of how it was made, and keeps nothing that is made of it for other readers."""


SMALL = 8
"""A value that has so many times fewer bytes than what it is made of, or made for, is computed once and kept."""


class Assembly:
    """The values of a step that are put together for each reader."""

    def __init__(self, plan: Sequence[Planned], cut: Set[core.Var]) -> None:
        """Find these values in the plan of a step, of which the inputs `cut` lie cut."""
        self._cut = cut
        self._made_by: dict[core.Var, Planned] = {}
        pure = [planned for planned in plan if not planned.in_shards and not planned.equation.whole.effects] if cut else []
        for planned in pure:
            operands = [v for v in list_variables(planned.equation.whole.invars) if v in self]
            self._add(planned, max(map(count_bytes, operands), default=0))
        read_for: dict[core.Var, int] = {}
        """The bytes of a value that is computed for each reader, by its operands."""
        for planned in reversed(pure):  # what is added to a weight, as the product of an adapter's narrow matrices
            results = planned.equation.whole.outvars
            self._add(planned, max((read_for[v] for v in results if v in read_for), default=0))
            if results and results[0] in self._made_by:
                largest = max(map(count_bytes, results))
                read_for |= dict.fromkeys(list_variables(planned.equation.whole.invars), largest)

    def _add(self, planned: Planned, largest: int) -> None:
        """Compute an equation for each reader if its results are not small. What it is computed of or for has `largest` bytes."""
        results = planned.equation.whole.outvars
        if SMALL * max(map(count_bytes, results)) > largest > 0:
            self._made_by |= dict.fromkeys(results, planned)

    def __contains__(self, atom: Atom) -> bool:
        return isinstance(atom, core.Var) and (atom in self._cut or atom in self._made_by)

    def list_sources(self, variables: Sequence[core.Var]) -> Iterator[core.Var]:
        """Yield what has to be known for variables to be put together, in their place."""
        for variable in variables:
            if variable in self._made_by:
                yield from self.list_sources(list_variables(self._made_by[variable].equation.whole.invars))
            else:
                yield variable

    def read(self, variable: core.Var, known: Mapping[core.Var, Array], after: Sequence[Array], calls: CutCalls) -> Array:
        """Put a value together for a reader, which has the arrays `after` beside it. Nothing of it is computed before they are there."""
        if variable in self._cut:
            like = jax.ShapeDtypeStruct(get_shape(variable), get_type(variable).dtype)
            return calls.put_together(known[variable], like, after)
        if variable in known:
            return known[variable]
        values = {
            source: self.read(source, known, after, calls) if source in self._cut else calls.come_after(known[source], after)
            for source in self.list_sources([variable])
        }
        # How it is computed must not change how it is read: where weights lie whole, it is computed once before all shards.
        return calls.come_after(self._compute(variable, values), [])

    def _compute(self, variable: core.Var, values: dict[core.Var, Array]) -> Array:
        """Compute a value of what it is made of. `values` keeps what is computed on the way."""
        if variable not in values:
            whole = self._made_by[variable].equation.whole
            operands = [a.val if isinstance(a, core.Literal) else self._compute(a, values) for a in whole.invars]
            values.update(zip(whole.outvars, bind(whole, operands), strict=True))
        return values[variable]
