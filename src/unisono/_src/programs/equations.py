"""Jaxprs with some equations replaced.

The types of rewrites are here, and this is the one place where a function takes an equation's place. Elsewhere only operands and results are
renamed.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Var

from unisono._src.programs.operands import Atom
from unisono._src.programs.private.jaxprs import enter_context

Params: TypeAlias = Mapping[str, Any]
"""The parameters of an equation, by name."""


class Producers(dict[Atom, JaxprEqn]):
    """The equation that made each variable of a jaxpr."""

    def __init__(self, program: Jaxpr) -> None:
        super().__init__({variable: eqn for eqn in program.eqns for variable in eqn.outvars})
        read = [atom for eqn in program.eqns for atom in eqn.invars] + list(program.outvars)
        self._times_read = collections.Counter(atom for atom in read if isinstance(atom, Var))

    def find(self, atom: Atom) -> JaxprEqn | None:
        """Find the equation that made a variable. None for an input of the jaxpr, and for a literal, which has no hash."""
        return self.get(atom) if isinstance(atom, Var) else None

    def find_if_read_once(self, atom: Atom) -> JaxprEqn | None:
        """Find the equation that made a variable, if it is read once. None if the equation has other results."""
        eqn = self.get(atom) if isinstance(atom, Var) and self._times_read[atom] == 1 else None
        return eqn if eqn is not None and len(eqn.outvars) == 1 else None


class Replacement(NamedTuple):
    """A substitute for an equation: `function` computes its result from `operands`."""

    function: Callable[..., jax.Array | tuple[jax.Array, ...]]
    operands: Sequence[Atom]
    origin: JaxprEqn | None = None
    """The equation whose scopes the substitute gets; None for the one that it replaces."""


Rewrite = Callable[[JaxprEqn, Producers], Replacement | None]
"""A rewrite returns None for an equation that stays as it is."""


def make_call(replacement: Replacement, eqn: JaxprEqn) -> JaxprEqn:
    """Build an equation that calls the replacement. It keeps the context of `eqn`, and its name in profiles."""
    with enter_context(eqn):
        traced = jax.make_jaxpr(jax.jit(replacement.function))(*(operand.aval for operand in replacement.operands))
    (call,) = traced.jaxpr.eqns
    source = (replacement.origin or eqn).source_info
    return call.replace(invars=list(replacement.operands), outvars=eqn.outvars, source_info=source, ctx=eqn.ctx)


def drop_names(program: Jaxpr) -> DebugInfo:
    """Drop the names of inputs and outputs from a jaxpr's debug info. The jaxpr gets others."""
    return program.debug_info._replace(arg_names=None, result_paths=None)


Traced: TypeAlias = Jaxpr | ClosedJaxpr
"""A jaxpr, open or closed."""

ProgramT = TypeVar("ProgramT", bound=Traced)

NESTED = {
    "jit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "eval_jaxpr": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "remat2": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
"""The parameters with nested jaxprs, for each primitive that is looked into. Other primitives with nested jaxprs are left as they are."""


def drop_unread(program: Jaxpr) -> Jaxpr:
    """Drop equations whose results nothing reads."""
    read = {atom for atom in program.outvars if isinstance(atom, Var)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(program.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return program.replace(eqns=kept[::-1])


class Rewriter:
    """Rewrites the jaxprs of one trace.

    A jaxpr that occurs twice is rewritten once, so that JAX lowers it once, too. A jaxpr in which nothing is replaced is the same
    object afterwards.
    """

    def __init__(
        self,
        rewrite: Rewrite,
        untouched: Container[str] = (),
        prepare: Callable[[Jaxpr], Jaxpr] | None = None,
        join: Callable[[Jaxpr], Jaxpr] | None = None,
    ) -> None:
        """Keep the rewrite.

        Args:
            rewrite: Gives the replacement of an equation, or None.
            untouched: The names of the primitives whose nested jaxprs stay as they are.
            prepare: Brings a jaxpr into the form in which the rewrite sees it. It stays in that form if something is replaced.
            join: Replaces several equations by one, before `prepare`.
        """
        self._find = rewrite
        self._join = join
        self._prepare = prepare
        self._untouched = untouched
        self._done: dict[Traced, Any] = {}

    def __call__(self, program: ProgramT) -> ProgramT:
        if program not in self._done:
            # Asked in this order: since JAX 0.11 all programs are of the class Jaxpr, and keep their constants when they are replaced.
            self._done[program] = self._rewrite_open(program) if isinstance(program, Jaxpr) else self._rewrite_closed(program)
        return self._done[program]

    def _rewrite_closed(self, program: ClosedJaxpr) -> ClosedJaxpr:
        inner = self(program.jaxpr)
        return program if inner is program.jaxpr else ClosedJaxpr(inner, program.consts)

    def _rewrite_open(self, program: Jaxpr) -> Jaxpr:
        joined = self._join(program) if self._join else program
        prepared = self._prepare(joined) if self._prepare else joined
        made_by = Producers(prepared)
        eqns = [self._rewrite_equation(eqn, made_by) for eqn in prepared.eqns]
        return joined if all(map(operator.is_, eqns, prepared.eqns)) else drop_unread(prepared.replace(eqns=eqns))

    def _rewrite_equation(self, eqn: JaxprEqn, made_by: Producers) -> JaxprEqn:
        substitute = self._find(eqn, made_by)
        if substitute:
            return make_call(substitute, eqn)
        primitive = eqn.primitive.name
        before = {name: eqn.params[name] for name in NESTED.get(primitive, ()) if primitive not in self._untouched}
        after = {name: self._rewrite_nested(value) for name, value in before.items()}
        is_same = all(map(operator.is_, before.values(), after.values()))
        return eqn if is_same else eqn.replace(params=eqn.params | after)

    def _rewrite_nested(self, value: Traced | tuple[Traced, ...]) -> Traced | tuple[Traced, ...]:
        if not isinstance(value, tuple):
            return self(value)
        branches = tuple(map(self, value))
        return value if all(map(operator.is_, value, branches)) else branches
