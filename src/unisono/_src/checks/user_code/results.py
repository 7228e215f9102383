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
    """Whether its first axis is that of the constant still, as after a slice and not after a sum over it, and no axis of a matrix that the
    replica's rows are multiplied by."""


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


CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
"""Equations that hold a program of the same arguments."""


def meetings(
    program: core.ClosedJaxpr, own: Collection[int], constants: Collection[int], own_constants: Collection[int] = ()
) -> list[Meeting]:
    """Return where the constants with these ids meet what leads from the replica: from the arguments at the positions `own`, and from the
    constants with the ids `own_constants`."""
    held = list(zip(program.jaxpr.constvars, program.consts, strict=True))
    values = {v: [(value, True)] for v, value in held if id(value) in constants}
    owned = {v for position, v in enumerate(program.jaxpr.invars) if position in own}
    owned |= {v for v, value in held if id(value) in own_constants}
    found = []
    for equation in program.jaxpr.eqns:
        given = [v for v in equation.invars if not isinstance(v, core.Literal)]
        others = [v for v in given if v not in owned and v in values]
        if any(v in owned for v in given):
            found += [
                Meeting(value, v.aval.shape, has_its_rows and meets_by_rows(equation, v))
                for v in others
                for value, has_its_rows in values[v]
            ]
            owned |= set(equation.outvars)
        elif others:
            for position, output in enumerate(equation.outvars):
                pairs = [
                    (value, has_its_rows and keeps_rows(equation, v)[position])
                    for v in dict.fromkeys(others)
                    for value, has_its_rows in values[v]
                ]
                values[output] = list(
                    {(id(value), has_its_rows): (value, has_its_rows) for value, has_its_rows in pairs}.values()
                )
    return found


def meets_by_rows(equation: core.JaxprEqn, operand: Any) -> bool:
    """Return whether the operand's first axis goes along an axis of rows: a product takes it with a first axis of the other side."""
    if equation.primitive.name != "dot_general":
        return True
    contracted, batched = equation.params["dimension_numbers"]
    is_left = operand is equation.invars[0]
    for axes in (contracted, batched):
        mine, theirs = axes if is_left else reversed(axes)
        if (0, 0) in zip(mine, theirs, strict=True):
            return True
    return False


def keeps_rows(equation: core.JaxprEqn, operand: Any) -> list[bool]:
    """Return, for what the equation gives, whether its first axis is that of the operand. Operations that nobody knows keep it."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if equation.primitive.name in CALLS and isinstance(inner, core.ClosedJaxpr):
        return keeps_rows_inside(inner.jaxpr, [v is operand for v in equation.invars])
    return [keeps_first_axis(equation, operand)] * len(equation.outvars)


def keeps_rows_inside(program: core.Jaxpr, has_rows: list[bool]) -> list[bool]:
    """Return it for a program, of which some arguments have the rows."""
    having = {v for v, has in zip(program.invars, has_rows, strict=True) if has}
    for equation in program.eqns:
        for operand in [v for v in equation.invars if not isinstance(v, core.Literal) and v in having]:
            having |= {v for v, keeps in zip(equation.outvars, keeps_rows(equation, operand), strict=True) if keeps}
    return [not isinstance(v, core.Literal) and v in having for v in program.outvars]


def keeps_first_axis(equation: core.JaxprEqn, operand: Any) -> bool:
    name, params = equation.primitive.name, equation.params
    if not operand.aval.shape:
        return False
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][0] == 0 and params["shape"][0] == operand.aval.shape[0]
    if name == "tile":
        return operand.aval.shape[0] > 1
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
