"""The one place where equations are made."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from unisono._src.jax_private.equations import enter_context
from unisono._src.typing import Shape

Atom: TypeAlias = Var | Literal
"""An operand of an equation."""

Params: TypeAlias = Mapping[str, Any]
"""The parameters of an equation, by name."""


class Producers(dict[Atom, JaxprEqn]):
    """The equation that made a variable, for each variable of a program."""

    def __init__(self, program: Jaxpr) -> None:
        super().__init__({variable: eqn for eqn in program.eqns for variable in eqn.outvars})
        read = [atom for eqn in program.eqns for atom in eqn.invars] + list(program.outvars)
        self._times_read = collections.Counter(atom for atom in read if isinstance(atom, Var))

    def find_if_read_once(self, atom: Atom) -> JaxprEqn | None:
        """Return the equation that made a variable, if it made nothing else and the variable is read once."""
        eqn = self.get(atom) if isinstance(atom, Var) and self._times_read[atom] == 1 else None
        return eqn if eqn is not None and len(eqn.outvars) == 1 else None


class Replacement(NamedTuple):
    """A substitute for an equation: `function` computes the same result from `operands`."""

    function: Callable[..., jax.Array]
    operands: Sequence[Atom]


Rule = Callable[[JaxprEqn, Producers], Replacement | None]
"""A rule returns None for an equation that stays as it is."""


def make_call(replacement: Replacement, eqn: JaxprEqn) -> JaxprEqn:
    """Return an equation that calls the replacement, with the name of `eqn` in profiles and in the context of `eqn`."""
    with enter_context(eqn):
        traced = jax.make_jaxpr(jax.jit(replacement.function))(*(operand.aval for operand in replacement.operands))
    (call,) = traced.jaxpr.eqns
    return call.replace(invars=list(replacement.operands), outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx)


def get_shape(atom: Atom) -> Shape:
    return cast(ShapedArray, atom.aval).shape
