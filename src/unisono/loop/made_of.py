"""What the results of a traced program are made of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from jax.extend import core
from jax.interpreters import partial_eval


class Meeting(NamedTuple):
    """Something that is made of a constant, and not of a replica's rows, where an operation takes it together with what is."""

    constant: Any
    shape: tuple[int, ...]


class MadeOf(NamedTuple):
    """What some results need."""

    arguments: set[int]
    """Positions among the program's arguments."""
    constants: list[Any]
    """Arrays that the program was given by nobody."""


def made_of(program: core.ClosedJaxpr, results: Collection[int]) -> MadeOf:
    """Return what the results at these positions are made of."""
    wanted = [position in results for position in range(len(program.jaxpr.outvars))]
    reduced, needed = partial_eval.dce_jaxpr(program.jaxpr, wanted)
    variables = [*(v for equation in reduced.eqns for v in equation.invars), *reduced.outvars]
    read = {v for v in variables if not isinstance(v, core.Literal)}
    constants = [value for v, value in zip(program.jaxpr.constvars, program.consts, strict=True) if v in read]
    return MadeOf({position for position, is_needed in enumerate(needed) if is_needed}, constants)


def meetings(program: core.ClosedJaxpr, own: Collection[int], constants: Collection[int]) -> list[Meeting]:
    """Return where the constants with these ids meet what the arguments at these positions, a replica's own, lead to."""
    values = {v: value for v, value in zip(program.jaxpr.constvars, program.consts, strict=True) if id(value) in constants}
    owned = {v for position, v in enumerate(program.jaxpr.invars) if position in own}
    found = []
    for equation in program.jaxpr.eqns:
        given = [v for v in equation.invars if not isinstance(v, core.Literal)]
        others = [v for v in given if v not in owned and v in values]
        if any(v in owned for v in given):
            found += [Meeting(values[v], v.aval.shape) for v in others]
            owned |= set(equation.outvars)
        elif others:
            values |= dict.fromkeys(equation.outvars, values[others[0]])
    return found
