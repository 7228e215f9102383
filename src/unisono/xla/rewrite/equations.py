"""The one place where equations are made; what is private in JAX here was checked with jax 0.10.2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

MadeBy = Mapping[Any, JaxprEqn]
"""For each variable of a program, the equation that made it."""


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
