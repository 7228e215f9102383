"""Marks: sentinel numbers as -1, -100 and NaN, by which code tells rows that count from rows that do not.

They are among the numbers that a traced program compares its inputs with.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from numpy.typing import ArrayLike

from unisono._src.jax_private.jaxprs import close_program
from unisono._src.operands import Atom
from unisono._src.typed_jax import finfo

EQUALITIES = ("eq", "ne")
COMPARISONS = (*EQUALITIES, "lt", "le", "gt", "ge")
SAME_NUMBERS = (
    "convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "transpose", "slice", "dynamic_slice", "rev", "copy",
    "stop_gradient", "reduce_precision", "expand_dims", "optimization_barrier", "copy_p",
)  # fmt: skip
"""Primitives whose result holds numbers of the first operand, unchanged."""

MOST_MARKS = 8
"""The largest number of marks that are tried."""

MARKED_FRACTIONS = 0.7, 0.3
"""The fraction of the elements that is marked in the first half of the rows, and in the second."""

NAN = float("nan")


def find_compared_values(program: core.ClosedJaxpr, inputs: Sequence[int]) -> dict[int, set[float]]:
    """Return, for the inputs at these positions, the numbers that the program compares their elements with.

    For `<` and the like, numbers on both sides of the bound are included. NaN is included where the program asks whether elements are NaN.

    >>> import jax, jax.numpy as jnp
    >>> masked = jax.make_jaxpr(lambda y, w: jnp.sum(jnp.where(y[:, 0] != -1, w, 0)))
    >>> find_compared_values(masked(jnp.ones((3, 2)), jnp.ones(3)), [0, 1])
    {0: {-1.0}}
    """
    compared: dict[int, set[float]] = collections.defaultdict(set)
    for position, number in iterate_compared(program, {program.jaxpr.invars[position]: position for position in inputs}, {}):
        compared[position].add(NAN if np.isnan(number) else number)  # a set takes other objects for other numbers
    return dict(compared)


def iterate_compared(
    program: core.ClosedJaxpr, positions: Mapping[core.Var, int], inputs: Mapping[core.Var, float]
) -> Iterator[tuple[int, float]]:
    """Yield the positions of inputs and the numbers that the program compares them with.

    `positions` are those of the inputs that the program's variables come from, `inputs` the variables that hold one number.
    """
    known = dict(positions)
    numbers = {**find_scalar_constants(program), **inputs}
    for eqn in program.jaxpr.eqns:
        primitive = eqn.primitive.name
        places = [None if isinstance(operand, core.Literal) else known.get(operand) for operand in eqn.invars]
        values = [find_number(operand, numbers) for operand in eqn.invars]
        if primitive in COMPARISONS:
            if eqn.invars[0] is eqn.invars[1] and places[0] is not None:  # x != x where x is NaN
                yield places[0], NAN
            for place, number in zip(places, reversed(values), strict=True):
                if place is not None and number is not None:
                    around = (0,) if primitive in EQUALITIES else (-1, 0, 1)
                    yield from ((place, number + offset) for offset in around)
        elif primitive in SAME_NUMBERS and eqn.invars:
            if places[0] is not None:
                known[eqn.outvars[0]] = places[0]
            if values[0] is not None:
                numbers[eqn.outvars[0]] = values[0]
        elif primitive == "is_finite" and places[0] is not None:
            yield places[0], NAN
        for inner in find_inner_programs(eqn):
            variables = inner.jaxpr.invars
            skipped = len(eqn.invars) - len(variables)  # the index of a branch
            yield from iterate_compared(
                inner,
                {variable: place for variable, place in zip(variables, places[skipped:], strict=True) if place is not None},
                {variable: number for variable, number in zip(variables, values[skipped:], strict=True) if number is not None},
            )


def find_inner_programs(eqn: core.JaxprEqn) -> Sequence[core.ClosedJaxpr]:
    """Return the programs that an equation runs on its last operands. Programs with loop counters are left out."""
    if eqn.primitive.name == "cond":
        return eqn.params["branches"]
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if not isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
        return []
    program = close_program(inner)
    return [program] if len(program.jaxpr.invars) == len(eqn.invars) else []


def find_scalar_constants(program: core.ClosedJaxpr) -> dict[core.Var, float]:
    """Return the constants of a program that are one number."""
    pairs = zip(program.jaxpr.constvars, program.consts, strict=True)
    return {variable: number for variable, value in pairs if (number := convert_number(value)) is not None}


def find_number(operand: Atom, numbers: Mapping[core.Var, float]) -> float | None:
    """Return the number that all elements of an operand are; None where they differ or are not known."""
    return convert_number(operand.val) if isinstance(operand, core.Literal) else numbers.get(operand)


def convert_number(value: ArrayLike) -> float | None:
    """Return a real number, bfloat16 included, as a float; None for all else."""
    if np.ndim(value):
        return None
    array = np.asarray(value)
    return float(array) if array.dtype.kind in "iu" or jnp.issubdtype(array.dtype, jnp.floating) else None


def find_factors(program: core.ClosedJaxpr) -> set[float]:
    """Return the numbers by which a program multiplies or divides arrays.

    >>> import jax
    >>> find_factors(jax.make_jaxpr(lambda x: x / 8.0 + 1.0)(1.0))
    {8.0}
    """
    constants = find_scalar_constants(program)
    factors: set[float] = set()
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name in ("mul", "div"):
            factors |= {number for operand in eqn.invars if (number := find_number(operand, constants)) is not None}
        factors = factors.union(*map(find_factors, find_inner_programs(eqn)))
    return factors


def mark_rows(
    rng: np.random.Generator, arrays: Sequence[np.ndarray], compared: Mapping[int, set[float]]
) -> Iterator[list[np.ndarray]]:
    """Yield the arrays with marks in some places, most of them in the first half of the rows: once for each mark that they can hold.

    `compared` holds the numbers that code compares the arrays with, by the arrays' positions.
    """
    marks = [
        sorted((mark for mark in compared.get(place, ()) if can_hold(mark, array.dtype)), key=lambda mark: (np.isnan(mark), mark))
        for place, array in enumerate(arrays)
    ]
    for number in range(min(MOST_MARKS, max(map(len, marks), default=0))):
        yield [
            place_mark(rng, values, own_marks[number % len(own_marks)]) if own_marks and values.ndim else values
            for values, own_marks in zip(arrays, marks, strict=True)
        ]


def place_mark(rng: np.random.Generator, array: np.ndarray, mark: float) -> np.ndarray:
    half = len(array) // 2
    fractions = np.where(np.arange(len(array)) < half, *MARKED_FRACTIONS).reshape(-1, *[1] * (array.ndim - 1))
    return np.where(rng.random(array.shape) < fractions, np.asarray(mark, array.dtype), array)


def can_hold(mark: float, dtype: np.dtype) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return not np.isfinite(mark) or abs(mark) <= float(finfo(dtype).max)
    if dtype.kind == "b":
        return mark in (0, 1)
    return dtype.kind in "iu" and float(mark).is_integer() and np.iinfo(dtype).min <= mark <= np.iinfo(dtype).max
