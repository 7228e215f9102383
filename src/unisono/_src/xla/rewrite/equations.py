"""The one place where equations are made; what is private in JAX here was checked with jax 0.10.2."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var


class MadeBy(dict[Any, JaxprEqn]):
    """For each variable of a program, the equation that made it."""

    def __init__(self, program: Jaxpr) -> None:
        super().__init__({variable: eqn for eqn in program.eqns for variable in eqn.outvars})
        read = [atom for eqn in program.eqns for atom in eqn.invars] + list(program.outvars)
        self._times_read = collections.Counter(atom for atom in read if isinstance(atom, Var))

    def of_once_read(self, atom: Any) -> JaxprEqn | None:
        """Return the equation that made a variable, if it made nothing else and the variable is read once."""
        eqn = self.get(atom) if isinstance(atom, Var) and self._times_read[atom] == 1 else None
        return eqn if eqn is not None and len(eqn.outvars) == 1 else None


class Replacement(NamedTuple):
    """What stands in for an equation: the same result, computed by `function` of `operands`."""

    function: Callable[..., Any]
    operands: Sequence[Any]


Rule = Callable[[JaxprEqn, MadeBy], Replacement | None]
"""Returns None for an equation that stays as it is."""


def called(replacement: Replacement, eqn: JaxprEqn) -> JaxprEqn:
    """`eqn`'s result by a call of the replacement, under `eqn`'s name in profiles and in `eqn`'s context."""
    with eqn.ctx.manager:  # private: the mesh and the compute type that were set where the equation was traced
        traced = jax.make_jaxpr(jax.jit(replacement.function))(*(operand.aval for operand in replacement.operands))
    (call,) = traced.jaxpr.eqns
    return call.replace(invars=list(replacement.operands), outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx)


def shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape
