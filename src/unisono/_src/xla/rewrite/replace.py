"""A traced program with some of its equations replaced, in nested programs too."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from unisono._src.xla.rewrite import equations
from unisono._src.xla.rewrite.equations import Producers, Rule
from unisono._src.xla.rewrite.rules import find_replacement, select_rules

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Traced: TypeAlias = Jaxpr | ClosedJaxpr
"""A traced program."""

ProgramT = TypeVar("ProgramT", bound=Traced)

NESTED = {
    "jit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "remat2": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
"""For each primitive that runs programs, the parameters that hold them. Others that hold some are left as they are."""


def rewrite_function(function: Callable[Arguments, Result], platform: str) -> Callable[Arguments, Result]:
    """Return `function` in the forms that XLA runs fast on `platform`; for use under `jax.jit`, where it costs no time at run time.

    The function is traced as it is and its equations are replaced afterwards, so it should be differentiated already:
    `rewritten(jax.grad(loss), "cpu")`, where `jax.grad(rewritten(loss, "cpu"))` would miss the gradients.

    >>> total = rewrite_function(lambda x: x.sum(), "cpu")
    >>> float(jax.jit(total)(jax.numpy.ones(3)))
    3.0
    """
    rule = functools.partial(find_replacement, select_rules(platform))

    @functools.wraps(function)
    def with_replacements(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        traced, out = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        run = jaxpr_as_fun(Rewriter(rule)(traced))
        return jax.tree.unflatten(jax.tree.structure(out), run(*jax.tree.leaves((args, kwargs))))

    return with_replacements


class Rewriter:
    """Rewrites the programs of one trace. A program that occurs twice is rewritten once, so that JAX lowers it once, too.

    A program in which nothing is replaced is the same object afterwards.
    """

    def __init__(self, rule: Rule, untouched: Container[str] = ()) -> None:
        """Keep the rule. `untouched` holds the names of the primitives whose nested programs stay as they are."""
        self._rule = rule
        self._untouched = untouched
        self._done: dict[Traced, Any] = {}

    def __call__(self, program: ProgramT) -> ProgramT:
        if program not in self._done:
            self._done[program] = (
                self._rewrite_closed(program) if isinstance(program, ClosedJaxpr) else self._rewrite_open(program)
            )
        return self._done[program]

    def _rewrite_closed(self, program: ClosedJaxpr) -> ClosedJaxpr:
        inner = self(program.jaxpr)
        return program if inner is program.jaxpr else ClosedJaxpr(inner, program.consts)

    def _rewrite_open(self, program: Jaxpr) -> Jaxpr:
        made_by = Producers(program)
        eqns = [self._rewrite_equation(eqn, made_by) for eqn in program.eqns]
        return program if all(map(operator.is_, eqns, program.eqns)) else program.replace(eqns=eqns)

    def _rewrite_equation(self, eqn: JaxprEqn, made_by: Producers) -> JaxprEqn:
        substitute = self._rule(eqn, made_by)
        if substitute:
            return equations.make_call(substitute, eqn)
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
