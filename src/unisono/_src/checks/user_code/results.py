"""Arguments and constants that the results of a traced program are made of."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jax.extend import core

from unisono._src.checks.user_code.jaxpr import Atom
from unisono._src.jax_private.equations import drop_unneeded
from unisono._src.typing import AnyArray, Shape


class ConstantOperand(NamedTuple):
    """An operand that is made of a constant alone, in an equation that also takes something made of a replica's rows."""

    constant: AnyArray
    shape: Shape
    has_its_rows: bool
    """Whether its first axis still is the first axis of the constant, as after a slice and not after a sum over it, and no axis of a matrix
    that the replica's rows are multiplied by."""


class Origins(NamedTuple):
    """Arguments and constants that some results are made of."""

    arguments: set[int]
    """Positions among the program's arguments."""
    constants: list[AnyArray]
    """Arrays in the program that are none of its arguments."""


def find_origins(program: core.ClosedJaxpr, results: Collection[int]) -> Origins:
    """Return the arguments and constants that the results at these positions are made of."""
    wanted = [position in results for position in range(len(program.jaxpr.outvars))]
    reduced, needed = drop_unneeded(program, wanted)
    return Origins({position for position, is_needed in enumerate(needed) if is_needed}, reduced.consts)


CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
"""Equations that hold a program of the same arguments."""


def find_constant_operands(
    program: core.ClosedJaxpr, own: Collection[int], constants: Collection[int], own_constants: Collection[int] = ()
) -> list[ConstantOperand]:
    """Return where an equation takes something made of the constants with these ids together with something made of the replica's values.

    The replica's values are the arguments at the positions `own`, and the constants with the ids `own_constants`.
    """
    consts = list(zip(program.jaxpr.constvars, program.consts, strict=True))
    values = {variable: [(value, True)] for variable, value in consts if id(value) in constants}
    owned = {variable for position, variable in enumerate(program.jaxpr.invars) if position in own}
    owned |= {variable for variable, value in consts if id(value) in own_constants}
    operands: list[ConstantOperand] = []
    for equation in program.jaxpr.eqns:
        variables = [variable for variable in equation.invars if not isinstance(variable, core.Literal)]
        others = [variable for variable in variables if variable not in owned and variable in values]
        if any(variable in owned for variable in variables):
            operands += [
                ConstantOperand(value, variable.aval.shape, has_its_rows and is_aligned_with_rows(equation, variable))
                for variable in others
                for value, has_its_rows in values[variable]
            ]
            owned |= set(equation.outvars)
        elif others:
            for position, output in enumerate(equation.outvars):
                pairs = [
                    (value, has_its_rows and mark_results_with_rows(equation, variable)[position])
                    for variable in dict.fromkeys(others)
                    for value, has_its_rows in values[variable]
                ]
                values[output] = list(
                    {(id(value), has_its_rows): (value, has_its_rows) for value, has_its_rows in pairs}.values()
                )
    return operands


def is_aligned_with_rows(equation: core.JaxprEqn, operand: Atom) -> bool:
    """Return whether the operand's first axis goes along an axis of rows: a product pairs it with the first axis of the other operand."""
    if equation.primitive.name != "dot_general":
        return True
    contracted, batched = equation.params["dimension_numbers"]
    is_left = operand is equation.invars[0]
    for axes in (contracted, batched):
        axes_of_operand, axes_of_other = axes if is_left else reversed(axes)
        if (0, 0) in zip(axes_of_operand, axes_of_other, strict=True):
            return True
    return False


def mark_results_with_rows(equation: core.JaxprEqn, operand: Atom) -> list[bool]:
    """Return, for each result of an equation, whether its first axis is that of the operand. Unknown operations keep it."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if equation.primitive.name in CALLS and isinstance(inner, core.ClosedJaxpr):
        return mark_results_of_program(inner.jaxpr, [variable is operand for variable in equation.invars])
    return [is_first_axis_kept(equation, operand)] * len(equation.outvars)


def mark_results_of_program(program: core.Jaxpr, has_rows: list[bool]) -> list[bool]:
    """Return, for each result of a program, whether its first axis is that of the arguments that have the rows."""
    with_rows = {variable for variable, has in zip(program.invars, has_rows, strict=True) if has}
    for equation in program.eqns:
        for operand in [
            variable for variable in equation.invars if not isinstance(variable, core.Literal) and variable in with_rows
        ]:
            with_rows |= {
                variable for variable, has in zip(equation.outvars, mark_results_with_rows(equation, operand), strict=True) if has
            }
    return [not isinstance(variable, core.Literal) and variable in with_rows for variable in program.outvars]


def is_first_axis_kept(equation: core.JaxprEqn, operand: Atom) -> bool:
    """Return whether the first axis of the results is that of the operand."""
    name = equation.primitive.name
    params = equation.params
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
