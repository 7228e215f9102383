"""What a function finds around it: arrays that reach replica code without being arguments, and traced values that leave it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer

from unisono.loop.arguments import Replicated, is_array

LIBRARIES = ("builtins", "jax", "jaxlib", "keras", "numpy", "unisono")


def arrays_around(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """(how the code calls it, an array) for each array that the function, or one that it calls, may find by a name, traced numbers
    among them."""
    seen: set[int] = set()
    return list(_of_function(function, seen))


def _of_function(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield from _of_function(function.func, seen)
        for name, value in [("an argument of functools.partial", a) for a in function.args] + list(function.keywords.items()):
            yield from _of_value(name, value, set(), seen)
        return
    if isinstance(function, types.MethodType):
        names = set(names_in(function.__func__.__code__)) if hasattr(function.__func__, "__code__") else set()
        yield from _of_value("self", function.__self__, names, seen)
        function = function.__func__
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield from _of_function(wrapped, seen)
    if not isinstance(function, types.FunctionType) or module_of(function) in LIBRARIES:
        return
    names = set(names_in(function.__code__))
    around = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            around[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name, value in around.items():
        yield from _of_value(name, value, names, seen)


def _of_value(name: str, value: Any, names: set[str], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """`names` are those that the code uses: of an object, only attributes with such names are looked at."""
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        yield from _of_function(value, seen)
    elif isinstance(value, keras.Variable | keras.Layer | Replicated | types.ModuleType | type):
        return
    elif is_array(value):
        if counts(value):
            yield name, value
    elif isinstance(value, list | tuple | dict):
        for leaf in jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, Replicated) or is_array(leaf)):
            if is_array(leaf) and counts(leaf) and not isinstance(leaf, Replicated):
                yield name, leaf
    elif module_of(type(value)) not in LIBRARIES and id(value) not in seen and hasattr(value, "__dict__"):
        seen.add(id(value))
        for attribute in names & vars(value).keys():
            yield from _of_value(f"{name}.{attribute}", vars(value)[attribute], names, seen)


def counts(array: Any) -> bool:
    return bool(len(array.shape)) or isinstance(array, Tracer)


def check_nothing_left(function: Callable[..., Any]) -> None:
    """After a trace: a value that stands for what will be computed must not have been kept anywhere."""
    for name, value in arrays_around(function):
        if isinstance(value, Tracer):
            raise ValueError(
                f"The function keeps a traced value in {name!r}, where Python would find no number in it, and the compiled function would "
                f"never put another. Return the value from the function, and keep what it returned."
            )


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names that code uses, and the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def module_of(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


def is_among(array: Any, constants: list[Any]) -> bool:
    """Whether an array, or some of its rows, went into a program that has these constants."""
    if isinstance(array, jax.Array):
        return any(constant is array for constant in constants)
    rows = np.asarray(array)
    return any(is_part(np.asarray(c), rows.astype(c.dtype)) for c in constants if c.shape[1:] == rows.shape[1:])


def is_part(part: np.ndarray, rows: np.ndarray) -> bool:
    """Whether some neighbouring rows are these."""
    count = len(part)
    if not 0 < count <= len(rows):
        return False
    starts = [
        start for start in range(len(rows) - count + 1) if np.array_equal(rows[start], part[0], equal_nan=part.dtype.kind == "f")
    ]
    return any(np.array_equal(rows[start : start + count], part, equal_nan=part.dtype.kind == "f") for start in starts)
