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
    has_its_rows: bool
    """Whether the first axis is that of the constant still, as after a slice, and not after a sum over it."""


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
    held = zip(program.jaxpr.constvars, program.consts, strict=True)
    values = {v: [(value, True)] for v, value in held if id(value) in constants}
    owned = {v for position, v in enumerate(program.jaxpr.invars) if position in own}
    found = []
    for equation in program.jaxpr.eqns:
        given = [v for v in equation.invars if not isinstance(v, core.Literal)]
        others = [v for v in given if v not in owned and v in values]
        if any(v in owned for v in given):
            found += [Meeting(value, v.aval.shape, has_its_rows) for v in others for value, has_its_rows in values[v]]
            owned |= set(equation.outvars)
        elif others:
            made = [(value, has and keeps_rows(equation, v)) for v in dict.fromkeys(others) for value, has in values[v]]
            values |= dict.fromkeys(equation.outvars, made)
    return found


def keeps_rows(equation: core.JaxprEqn, operand: Any) -> bool:
    """Return whether the first axis of what the equation gives is that of the operand. Operations that nobody knows keep it."""
    name, params = equation.primitive.name, equation.params
    if not operand.aval.shape:
        return False
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][0] == 0 and params["shape"][0] == operand.aval.shape[0]
    if name == "transpose":
        return params["permutation"][0] == 0
    if name.startswith("reduce_") and "axes" in params:
        return 0 not in params["axes"]
    if name == "dot_general":
        (left, _), (left_batch, right_batch) = params["dimension_numbers"]
        if operand is not equation.invars[0]:
            return tuple(right_batch[:1]) == (0,)
        return tuple(left_batch[:1]) == (0,) if left_batch else 0 not in left
    return True
