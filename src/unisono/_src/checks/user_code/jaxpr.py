"""What a traced program holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

COLLECTIVES = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "axis_index",
    "shard_map", "xla_pmap", "pvary",
}  # fmt: skip


def constants_of(program: core.ClosedJaxpr) -> list[Any]:
    """The arrays that the program was given by nobody, without numbers."""
    return [constant for part in parts_of(program) for constant in part.consts if getattr(constant, "shape", ())]


def constants_outside(program: core.ClosedJaxpr, mark: str) -> list[Any]:
    """Those among them that go into something beside what is marked, or are results as they are."""
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    unmarked = [equation for equation in program.jaxpr.eqns if mark not in str(equation.source_info.name_stack)]
    read = [*(v for equation in unmarked for v in equation.invars), *program.jaxpr.outvars]
    used = {v for v in read if not isinstance(v, core.Literal) and v in constants}
    return [constant for v, constant in constants.items() if v in used and getattr(constant, "shape", ())]


def check_collectives(name: str, program: core.ClosedJaxpr) -> None:
    for part in parts_of(program):
        for equation in part.jaxpr.eqns:
            if equation.primitive.name in COLLECTIVES:
                raise ValueError(
                    f"The function {name!r} uses the collective {equation.primitive.name!r}, but replicas of one device run one after "
                    f"another: they have nobody to talk to. Return the value, and add over replicas after strategy.run, by "
                    f'strategy.reduce("SUM", value, axis=None).'
                )


def parts_of(program: core.ClosedJaxpr) -> Iterator[core.ClosedJaxpr]:
    """The program and all that are nested in it."""
    yield program
    for equation in program.jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if isinstance(inner, core.ClosedJaxpr):
                    yield from parts_of(inner)
                elif isinstance(inner, core.Jaxpr):
                    yield from parts_of(core.ClosedJaxpr(inner, ()))


def is_random(program: core.ClosedJaxpr) -> bool:
    """Whether random numbers are drawn."""
    names = {equation.primitive.name for part in parts_of(program) for equation in part.jaxpr.eqns}
    return any(map(is_random_name, names))


def is_random_name(name: str) -> bool:
    """Whether a primitive of this name draws."""
    return name.startswith(("random_", "threefry", "rng_"))


def has_float16(program: core.ClosedJaxpr) -> bool:
    results = (result.aval for part in parts_of(program) for equation in part.jaxpr.eqns for result in equation.outvars)
    return any(getattr(result, "dtype", None) == "float16" for result in results)


def is_among(array: Any, constants: list[Any]) -> bool:
    """Whether an array, or some of its rows, went into a program that has these constants."""
    if isinstance(array, jax.Array):
        return any(constant is array for constant in constants)
    rows = np.asarray(array)
    return any(is_part(np.asarray(c), rows.astype(c.dtype)) for c in constants if c.shape[1:] == rows.shape[1:])


def is_part(part: np.ndarray, rows: np.ndarray) -> bool:
    """Whether some neighbouring rows are these. A few whole numbers may be anything."""
    count = len(part)
    if not 0 < count <= len(rows) or (count < len(rows) and part.dtype.kind != "f" and part.ndim == 1):
        return False
    starts = np.arange(len(rows) - count + 1)
    for number, row in enumerate(part):
        there = rows[starts + number]
        alike = (there == row) | ((there != there) & (row != row))  # NaN too
        starts = starts[alike.reshape(len(starts), -1).all(axis=1)]
        if not len(starts):
            return False
    return True


def may_come_from(constant: np.ndarray, array: np.ndarray) -> bool:
    """Whether a constant looks as if it was computed from an array around, whose values the code reads: as many rows, rows of its shape
    or a stack of such arrays, its very numbers, or sizes that are all its own."""
    if constant.shape[:1] == array.shape[:1] or constant.shape[1:] == array.shape:
        return True
    if array.ndim == 1:
        return constant.ndim == 1 and constant.dtype.kind == "f" and bool(np.isin(constant, array).all())
    sizes = {size for size in array.shape if size > 1}
    return constant.shape[1:] == array.shape[1:] or (
        constant.ndim > 1 and all(size in (1, *sizes) for size in constant.shape) and bool(sizes & set(constant.shape))
    )
