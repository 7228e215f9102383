"""Numbers that a traced program compares its inputs with: the marks by which code tells rows that count from rows that do not."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend import core

EQUALITIES = ("eq", "ne")
COMPARISONS = (*EQUALITIES, "lt", "le", "gt", "ge")
SAME_NUMBERS = (
    "convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "transpose", "slice", "dynamic_slice", "rev", "copy",
    "stop_gradient", "reduce_precision", "expand_dims", "optimization_barrier", "copy_p",
)  # fmt: skip
"""Primitives whose result holds numbers of the first operand, unchanged."""

Operand: TypeAlias = core.Var | core.Literal


def find_compared_values(program: core.ClosedJaxpr, inputs: Sequence[int]) -> dict[int, set[float]]:
    """Return, for the inputs at these positions, the numbers that the program compares their elements with.

    For `<` and the like, numbers on both sides of the bound are included. NaN is included where the program asks whether elements are NaN.

    >>> import jax, jax.numpy as jnp
    >>> masked = jax.make_jaxpr(lambda y, w: jnp.sum(jnp.where(y[:, 0] != -1, w, 0)))
    >>> find_compared_values(masked(jnp.ones((3, 2)), jnp.ones(3)), [0, 1])
    {0: {-1.0}}
    """
    positions = {program.jaxpr.invars[position]: position for position in inputs}
    compared: dict[int, set[float]] = collections.defaultdict(set)
    collect_compared(program.jaxpr, positions, find_scalar_constants(program), compared)
    return dict(compared)


def collect_compared(
    program: core.Jaxpr,
    positions: Mapping[core.Var, int],
    constants: Mapping[core.Var, float],
    compared: dict[int, set[float]],
) -> None:
    """Add to `compared` the numbers that the program compares variables with.

    Args:
        program: The program.
        positions: The positions of the inputs that variables come from.
        constants: The variables that hold one number, with this number.
        compared: The numbers, by positions.
    """
    known = dict(positions)
    numbers = dict(constants)
    for eqn in program.eqns:
        primitive = eqn.primitive.name
        if primitive in COMPARISONS:
            note_comparison(eqn, known, numbers, compared)
        elif primitive in SAME_NUMBERS and eqn.invars:
            source = eqn.invars[0]
            if not isinstance(source, core.Literal) and source in known:
                known[eqn.outvars[0]] = known[source]
            if (number := find_number(source, numbers)) is not None:
                numbers[eqn.outvars[0]] = number
        elif primitive == "is_finite" and not isinstance(eqn.invars[0], core.Literal) and eqn.invars[0] in known:
            compared[known[eqn.invars[0]]].add(float("nan"))
        for inner, operands in find_inner_programs(eqn):
            pairs = list(zip(inner.jaxpr.invars, operands, strict=True))
            known_inside = {
                variable: known[operand]
                for variable, operand in pairs
                if not isinstance(operand, core.Literal) and operand in known
            }
            numbers_inside = {
                variable: number for variable, operand in pairs if (number := find_number(operand, numbers)) is not None
            }
            collect_compared(inner.jaxpr, known_inside, find_scalar_constants(inner) | numbers_inside, compared)


def note_comparison(
    eqn: core.JaxprEqn, known: Mapping[core.Var, int], numbers: Mapping[core.Var, float], compared: dict[int, set[float]]
) -> None:
    """Add to `compared` the numbers of one comparison with known variables."""
    left, right = eqn.invars
    if left is right and not isinstance(left, core.Literal) and left in known:  # x != x where x is NaN
        compared[known[left]].add(float("nan"))
        return
    for one, other in ((left, right), (right, left)):
        number = find_number(other, numbers)
        if number is not None and not isinstance(one, core.Literal) and one in known:
            compared[known[one]] |= {number} if eqn.primitive.name in EQUALITIES else {number - 1, number, number + 1}


def find_inner_programs(eqn: core.JaxprEqn) -> list[tuple[core.ClosedJaxpr, Sequence[Operand]]]:
    """Return the programs that an equation runs, each with its operands. Programs with loop counters are left out."""
    if eqn.primitive.name == "cond":
        return [(branch, eqn.invars[1:]) for branch in eqn.params["branches"]]
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if isinstance(inner, core.Jaxpr):
        inner = core.ClosedJaxpr(inner, ())
    if not isinstance(inner, core.ClosedJaxpr) or len(inner.jaxpr.invars) != len(eqn.invars):
        return []
    return [(inner, eqn.invars)]


def find_scalar_constants(program: core.ClosedJaxpr) -> dict[core.Var, float]:
    """Return the constants of a program that are one number."""
    pairs = zip(program.jaxpr.constvars, program.consts, strict=True)
    return {variable: float(value) for variable, value in pairs if np.ndim(value) == 0 and has_real_numbers(np.asarray(value))}


def find_number(operand: Operand, numbers: Mapping[core.Var, float]) -> float | None:
    """Return the number that all elements of an operand are; None where they differ or are not known."""
    if isinstance(operand, core.Literal):
        value = np.asarray(operand.val)
        return float(value) if value.ndim == 0 and has_real_numbers(value) else None
    return numbers.get(operand)


def has_real_numbers(array: np.ndarray) -> bool:
    """Return whether an array holds real numbers, bfloat16 included."""
    return array.dtype.kind in "iu" or bool(jnp.issubdtype(array.dtype, jnp.floating))


def find_factors(program: core.ClosedJaxpr) -> set[float]:
    """Return the numbers by which a program multiplies or divides arrays.

    >>> import jax
    >>> find_factors(jax.make_jaxpr(lambda x: x / 8.0 + 1.0)(1.0))
    {8.0}
    """
    constants = find_scalar_constants(program)
    numbers: set[float] = set()
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name in ("mul", "div"):
            numbers |= {number for operand in eqn.invars if (number := find_number(operand, constants)) is not None}
        for inner, _ in find_inner_programs(eqn):
            numbers |= find_factors(inner)
    return numbers
