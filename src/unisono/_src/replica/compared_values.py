"""With which numbers a traced program compares what it is given: the marks by which code tells rows that count from those that do not."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

EQUALITIES = ("eq", "ne")
COMPARISONS = (*EQUALITIES, "lt", "le", "gt", "ge")
SAME_NUMBERS = (
    "convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "transpose", "slice", "dynamic_slice", "rev", "copy",
    "stop_gradient", "reduce_precision", "expand_dims", "optimization_barrier", "copy_p",
)  # fmt: skip
"""What hands some of the numbers of its first operand on as they are."""


def compared_values(program: core.ClosedJaxpr, inputs: Sequence[int]) -> dict[int, set[float]]:
    """Return, for the inputs at these positions, the numbers that the program compares their elements with.

    Of an order, numbers on both sides are among them, and NaN where the program asks whether elements are NaN.

    >>> import jax, jax.numpy as jnp
    >>> masked = jax.make_jaxpr(lambda y, w: jnp.sum(jnp.where(y[:, 0] != -1, w, 0)))
    >>> compared_values(masked(jnp.ones((3, 2)), jnp.ones(3)), [0, 1])
    {0: {-1.0}}
    """
    names = {program.jaxpr.invars[position]: position for position in inputs}
    found: dict[int, set[float]] = collections.defaultdict(set)
    compare(program.jaxpr, names, constants_of(program), found)
    return dict(found)


def compare(program: core.Jaxpr, names: Mapping[Any, int], constants: Mapping[Any, float], found: dict[int, set[float]]) -> None:
    """Add to `found` what the program compares the named variables with; `constants` are variables that hold one number."""
    known, numbers = dict(names), dict(constants)
    for eqn in program.eqns:
        primitive = eqn.primitive.name
        if primitive in COMPARISONS:
            note_comparison(eqn, known, numbers, found)
        elif primitive in SAME_NUMBERS and eqn.invars:
            source = eqn.invars[0]
            if not isinstance(source, core.Literal) and source in known:
                known[eqn.outvars[0]] = known[source]
            if (number := number_of(source, numbers)) is not None:
                numbers[eqn.outvars[0]] = number
        elif primitive == "is_finite" and not isinstance(eqn.invars[0], core.Literal) and eqn.invars[0] in known:
            found[known[eqn.invars[0]]].add(float("nan"))
        for inner, operands in programs_in(eqn):
            pairs = list(zip(inner.jaxpr.invars, operands, strict=True))
            names_inside = {v: known[o] for v, o in pairs if not isinstance(o, core.Literal) and o in known}
            numbers_inside = {v: number for v, o in pairs if (number := number_of(o, numbers)) is not None}
            compare(inner.jaxpr, names_inside, constants_of(inner) | numbers_inside, found)


def note_comparison(
    eqn: core.JaxprEqn, known: Mapping[Any, int], numbers: Mapping[Any, float], found: dict[int, set[float]]
) -> None:
    """Add to `found` what one comparison says of the variables that are known."""
    left, right = eqn.invars
    if left is right and not isinstance(left, core.Literal) and left in known:  # x != x where x is NaN
        found[known[left]].add(float("nan"))
        return
    for one, other in ((left, right), (right, left)):
        number = number_of(other, numbers)
        if number is not None and not isinstance(one, core.Literal) and one in known:
            found[known[one]] |= {number} if eqn.primitive.name in EQUALITIES else {number - 1, number, number + 1}


def programs_in(eqn: core.JaxprEqn) -> list[tuple[core.ClosedJaxpr, Sequence[Any]]]:
    """Return the programs that an equation runs, each with what it is given; those with loop counters are left out."""
    if eqn.primitive.name == "cond":
        return [(branch, eqn.invars[1:]) for branch in eqn.params["branches"]]
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if isinstance(inner, core.Jaxpr):
        inner = core.ClosedJaxpr(inner, ())
    if not isinstance(inner, core.ClosedJaxpr) or len(inner.jaxpr.invars) != len(eqn.invars):
        return []
    return [(inner, eqn.invars)]


def constants_of(program: core.ClosedJaxpr) -> dict[Any, float]:
    """Return the constants of a program that are one number."""
    pairs = zip(program.jaxpr.constvars, program.consts, strict=True)
    return {variable: float(value) for variable, value in pairs if np.ndim(value) == 0 and is_of_numbers(np.asarray(value))}


def number_of(operand: Any, numbers: Mapping[Any, float]) -> float | None:
    """Return the number that an operand is, wherever in it one looks; None where it is none."""
    if isinstance(operand, core.Literal):
        value = np.asarray(operand.val)
        return float(value) if value.ndim == 0 and is_of_numbers(value) else None
    return numbers.get(operand)


def is_of_numbers(array: np.ndarray) -> bool:
    """Return whether an array holds real numbers, those of bfloat16 among them."""
    return array.dtype.kind in "iu" or bool(jnp.issubdtype(array.dtype, jnp.floating))


def factors(program: core.ClosedJaxpr) -> set[float]:
    """Return the numbers by which a program multiplies or divides arrays.

    >>> import jax
    >>> factors(jax.make_jaxpr(lambda x: x / 8.0 + 1.0)(1.0))
    {8.0}
    """
    constants = constants_of(program)
    found: set[float] = set()
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name in ("mul", "div"):
            found |= {number for operand in eqn.invars if (number := number_of(operand, constants)) is not None}
        for inner, _ in programs_in(eqn):
            found |= factors(inner)
    return found
