"""Constants, collectives and random draws of a traced program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt
from jax.extend import core

from unisono._src.typing import AnyArray

COLLECTIVES = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "axis_index",
    "shard_map", "xla_pmap", "pvary",
}  # fmt: skip


class Atom(Protocol):
    """An operand or a result in a traced program: a variable or a literal of JAX, or a variable of a function that was opened up."""

    aval: Any
    """The shape and dtype. JAX types it as a class that has neither."""


def find_constants(program: core.ClosedJaxpr) -> list[AnyArray]:
    """Return the arrays in the program that are none of its arguments; single numbers are left out."""
    return [constant for nested in walk_programs(program) for constant in nested.consts if getattr(constant, "shape", ())]


def find_unmarked_constants(program: core.ClosedJaxpr, mark: str) -> list[AnyArray]:
    """Return the constant arrays that an equation without the mark reads, and those that are results as they are."""
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    unmarked = [equation for equation in program.jaxpr.eqns if mark not in str(equation.source_info.name_stack)]
    read = [*(variable for equation in unmarked for variable in equation.invars), *program.jaxpr.outvars]
    used = {variable for variable in read if not isinstance(variable, core.Literal) and variable in constants}
    return [constant for variable, constant in constants.items() if variable in used and getattr(constant, "shape", ())]


def check_collectives(name: str, program: core.ClosedJaxpr) -> None:
    for nested in walk_programs(program):
        for equation in nested.jaxpr.eqns:
            if equation.primitive.name in COLLECTIVES:
                raise ValueError(
                    f"The function {name!r} uses the collective {equation.primitive.name!r}, but replicas of one device run one after "
                    f"another: they have nobody to talk to. Return the value, and add over replicas after strategy.run, by "
                    f'strategy.reduce("SUM", value, axis=None).'
                )


def walk_programs(program: core.ClosedJaxpr) -> Iterator[core.ClosedJaxpr]:
    """Yield the program and all programs that are nested in it."""
    yield program
    for equation in program.jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if isinstance(inner, core.ClosedJaxpr):
                    yield from walk_programs(inner)
                elif isinstance(inner, core.Jaxpr):
                    yield from walk_programs(core.ClosedJaxpr(inner, ()))


def has_random_draws(program: core.ClosedJaxpr) -> bool:
    """Return whether the program draws random numbers."""
    names = {equation.primitive.name for nested in walk_programs(program) for equation in nested.jaxpr.eqns}
    return any(map(is_random_primitive, names))


def is_random_primitive(name: str) -> bool:
    """Return whether a primitive of this name draws random numbers."""
    return name.startswith(("random_", "threefry", "rng_"))


def has_float16(program: core.ClosedJaxpr) -> bool:
    results = (result.aval for nested in walk_programs(program) for equation in nested.jaxpr.eqns for result in equation.outvars)
    return any(getattr(result, "dtype", None) == "float16" for result in results)


def is_among_constants(array: npt.ArrayLike, constants: list[AnyArray]) -> bool:
    """Return whether an array, or some of its rows, went into a program that has these constants."""
    if isinstance(array, jax.Array):
        return any(constant is array for constant in constants)
    rows = np.asarray(array)
    return any(
        has_adjacent_rows(np.asarray(constant), rows.astype(constant.dtype))
        for constant in constants
        if constant.shape[1:] == rows.shape[1:]
    )


def has_adjacent_rows(wanted: np.ndarray, rows: np.ndarray) -> bool:
    """Return whether the wanted rows are in `rows`, next to each other. A few whole numbers may be anything."""
    count = len(wanted)
    if not 0 < count <= len(rows) or (count < len(rows) and wanted.dtype.kind != "f" and wanted.ndim == 1):
        return False
    starts = np.arange(len(rows) - count + 1)
    for number, row in enumerate(wanted):
        candidates = rows[starts + number]
        alike = (candidates == row) | ((candidates != candidates) & (row != row))  # NaN too
        starts = starts[alike.reshape(len(starts), -1).all(axis=1)]
        if not len(starts):
            return False
    return True


def can_come_from(constant: np.ndarray, array: np.ndarray) -> bool:
    """Return whether a constant may have been computed from a captured array, whose values the code reads.

    Signs of this are as many rows, rows of its shape, a stack of such arrays, the same numbers, or sizes that the array has too.
    """
    if constant.shape[:1] == array.shape[:1] or constant.shape[1:] == array.shape:
        return True
    if array.ndim == 1:
        return constant.ndim == 1 and constant.dtype.kind == "f" and bool(np.isin(constant, array).all())
    sizes = {size for size in array.shape if size > 1}
    return constant.shape[1:] == array.shape[1:] or (
        constant.ndim > 1 and all(size in (1, *sizes) for size in constant.shape) and bool(sizes & set(constant.shape))
    )
