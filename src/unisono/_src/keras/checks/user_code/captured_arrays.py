"""Captured values that must not reach what is compiled.

They are arrays that are no arguments, iterators, and traced values. Arrays of a jaxpr are also compared with captured ones: one
may be the captured array, or may have been computed from it.
"""

from __future__ import annotations

import collections
import io
import itertools
from collections.abc import Iterator, Mapping

import jax
import keras
import numpy as np
import numpy.typing as npt
from jax.core import Tracer

from unisono._src.keras.checks.user_code.captures import Capture, is_user_module
from unisono._src.keras.replica.replicated import Replicated, is_array
from unisono._src.typing import AnyArray, LibraryArray, UserObject

MOST_ITEMS_IN_LISTS = 1024


def find_captured_arrays(captures: list[Capture]) -> list[tuple[str, LibraryArray]]:
    """Find the arrays that a function reaches by names.

    They come with the name that the code writes. Functions that it calls count too.

    Traced numbers are among them.
    """
    return [
        (capture.path, array)
        for capture in captures
        if capture.holds_data
        for array in find_arrays(capture.value)
        if len(array.shape) or isinstance(array, Tracer)
    ]


def find_replicated_arrays(captures: list[Capture]) -> list[AnyArray]:
    """Find the captured arrays that are marked as replicated."""
    leaves = [leaf for capture in captures for leaf in find_leaves(capture.value) if isinstance(leaf, Replicated)]
    return [array for replicated in leaves for array in jax.tree.leaves(replicated)]


def find_arrays(value: UserObject) -> Iterator[LibraryArray]:
    return (leaf for leaf in find_leaves(value) if is_array(leaf) and not isinstance(leaf, Replicated))


def find_leaves(value: UserObject) -> Iterator[UserObject]:
    """Yield the leaves of a value, or the value itself. Of a long list only the first items are looked at."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple | collections.deque | set):
        yield value
        return
    for item in itertools.islice(value, MOST_ITEMS_IN_LISTS):
        yield from find_leaves(item)


def is_source_of_items(value: object) -> bool:
    """Whether a value gives items that no name leads to. It is an iterator, or an object of a user's class that has items."""
    kind = type(value)
    return isinstance(value, Iterator | keras.utils.PyDataset) or (
        hasattr(kind, "__getitem__") and is_user_module(kind.__module__)
    )


def refuse_compiled_captures(captures: list[Capture]) -> None:
    """Refuse traced values that the function has kept, and iterators.

    It is checked after a trace. Compiled code has the same item for good.
    """
    for capture in captures:
        if any(isinstance(array, Tracer) for array in find_arrays(capture.value)):
            raise ValueError(
                f"The function keeps a traced value in {capture.path!r}, where Python would find no number in it, and the compiled function would "
                f"never put another. Return the value from the function, and keep what it returned."
            )
    for capture in captures:
        if isinstance(capture.value, Iterator) and not isinstance(capture.value, io.IOBase):
            raise ValueError(
                f"The function finds the iterator {capture.path!r} by its name. Compiled, it would take from it once, when it is traced, and "
                f"have the same in every call. Take from it outside, and pass what it gives as an argument: next({capture.path})."
            )


def is_among_constants(array: npt.ArrayLike, constants: list[AnyArray]) -> bool:
    """Whether an array, or rows of it, are among these constants. They are those of a jaxpr."""
    if isinstance(array, jax.Array):
        return any(constant is array for constant in constants)
    rows = np.asarray(array)
    return any(
        has_adjacent_rows(np.asarray(constant), rows.astype(constant.dtype))
        for constant in constants
        if constant.shape[1:] == rows.shape[1:]
    )


def has_adjacent_rows(wanted: np.ndarray, rows: np.ndarray) -> bool:
    """Whether `rows` contain the wanted rows, next to each other. A few integers may be anything, and do not count."""
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
    """Whether a constant may have been computed from a captured array. The code reads its values.

    Signs of this are an equal number of rows, rows of its shape, a stack of such arrays, the same numbers, or sizes that the
    array has too.
    """
    if constant.shape[:1] == array.shape[:1] or constant.shape[1:] == array.shape:
        return True
    if array.ndim == 1:
        return constant.ndim == 1 and constant.dtype.kind == "f" and bool(np.isin(constant, array).all())
    sizes = {size for size in array.shape if size > 1}
    return constant.shape[1:] == array.shape[1:] or (
        constant.ndim > 1 and all(size in (1, *sizes) for size in constant.shape) and bool(sizes & set(constant.shape))
    )


def is_chosen_from(vector: np.ndarray, source: np.ndarray) -> bool:
    """Whether a vector has only values of another vector. Labels that were chosen from it do."""
    return vector.ndim == source.ndim == 1 and bool(np.isin(vector, source).all())
