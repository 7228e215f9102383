"""Find where constants meet a replica's rows in a jaxpr.

An operand that is made of constants alone is combined there with what is made of rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jax.extend import core

from unisono._src.keras.checks.user_code.provenance import Provenance
from unisono._src.programs.operands import Atom, find_dependents, get_shape, list_variables
from unisono._src.typing import AnyArray, Shape


class ConstantOperand(NamedTuple):
    """An operand made of a constant, which meets a replica's rows.

    The rows, or what is made of them, are another operand of the equation.
    """

    constant: AnyArray
    shape: Shape
    has_its_rows: bool
    """Whether its first axis is still that of the constant, as after a slice, and not after a sum over it. An axis of a matrix that multiplies the
    replica's rows does not count."""


def find_constant_operands(
    sources: Provenance, constants: Collection[int], own_constants: Collection[int] = ()
) -> list[ConstantOperand]:
    """Find where equations combine these constants with the replica's values. The constants are given by ids.

    The replica's values are its arguments, and the constants with the ids `own_constants`.
    """
    program = sources.program.jaxpr
    values = list(zip(program.constvars, sources.program.consts, strict=True))
    made_of = {variable: {(id(value), True): value} for variable, value in values if id(value) in constants}
    own = [variable for variable, value in values if id(value) in own_constants]
    of_replica = find_dependents(program, [*(program.invars[position] for position in sources.replica_positions), *own])
    operands: list[ConstantOperand] = []
    for equation in program.eqns:
        variables = dict.fromkeys(list_variables(equation.invars))
        others = [variable for variable in variables if variable not in of_replica and variable in made_of]
        if not of_replica.isdisjoint(variables):
            operands += [
                ConstantOperand(value, get_shape(variable), has_its_rows and pairs_first_axes(equation))
                for variable in others
                for (_, has_its_rows), value in made_of[variable].items()
            ]
        elif others:
            pairs = {
                (key, has_its_rows and is_first_axis_kept(equation, variable)): value
                for variable in others
                for (key, has_its_rows), value in made_of[variable].items()
            }
            made_of |= dict.fromkeys(equation.outvars, pairs)
    return operands


def pairs_first_axes(equation: core.JaxprEqn) -> bool:
    """Whether the operands' first axes are paired. In a matmul they may not be."""
    is_product = equation.primitive.name == "dot_general"
    return not is_product or any((0, 0) in zip(*axes, strict=True) for axes in equation.params["dimension_numbers"])


def is_first_axis_kept(equation: core.JaxprEqn, operand: Atom) -> bool:
    """Whether the results' first axis is that of the operand. Unknown operations keep it."""
    name = equation.primitive.name
    params = equation.params
    if not get_shape(operand):
        return False
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][0] == 0 and params["shape"][0] == get_shape(operand)[0]
    if name == "tile":
        return get_shape(operand)[0] > 1
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
