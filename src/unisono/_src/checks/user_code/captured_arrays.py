"""Values that a function captures and that must not reach what is compiled: arrays that are no arguments, iterators, traced values."""

from __future__ import annotations

import collections
import io
import itertools
from collections.abc import Iterator, Mapping
from typing import Protocol

import jax
import keras
import numpy as np
from jax.core import Tracer

from unisono._src.checks.user_code.captures import find_captures, is_user_module
from unisono._src.distributed.replicated import Replicated, is_array
from unisono._src.typing import AnyArray, Shape, UserFunction, UserObject

MOST_ITEMS_IN_LISTS = 1024


class CapturedArray(Protocol):
    """An array of any library."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> object: ...

    def __array__(self) -> np.ndarray: ...


def find_captured_arrays(function: UserFunction) -> list[tuple[str, CapturedArray]]:
    """Return the arrays that the function, or one that it calls, may find by a name, each with the name that the code writes.

    Traced numbers are among them.
    """
    return [
        (capture.path, array)
        for capture in find_captures(function)
        if capture.holds_data
        for array in find_arrays(capture.value)
        if is_data(array)
    ]


def find_replicated_arrays(function: UserFunction) -> list[AnyArray]:
    """Return the captured arrays that are meant to be the same for all replicas."""
    leaves = [leaf for capture in find_captures(function) for leaf in find_leaves(capture.value) if isinstance(leaf, Replicated)]
    return [array for replicated in leaves for array in jax.tree.leaves(replicated)]


def find_arrays(value: UserObject) -> Iterator[CapturedArray]:
    return (leaf for leaf in find_leaves(value) if is_array(leaf) and not isinstance(leaf, Replicated))


def find_leaves(value: UserObject) -> Iterator[UserObject]:
    """Return a value, or what is in it, however deep; of a long list the first items."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple | collections.deque | set):
        yield value
        return
    for item in itertools.islice(value, MOST_ITEMS_IN_LISTS):
        yield from find_leaves(item)


def has_captured_source(function: UserFunction) -> bool:
    """Return whether the function captures something that may give it arrays which no name leads to."""
    return any(capture.holds_data and is_source_of_items(capture.value) for capture in find_captures(function))


def is_source_of_items(value: object) -> bool:
    """Return whether a value is an iterator, or an object of a user's class that has items."""
    kind = type(value)
    return isinstance(value, Iterator | keras.utils.PyDataset) or (
        hasattr(kind, "__getitem__") and is_user_module(kind.__module__)
    )


def is_data(array: CapturedArray) -> bool:
    """Return whether an array may hold data: it is no single number, or it is traced."""
    return bool(len(array.shape)) or isinstance(array, Tracer)


def check_leaked_tracers(function: UserFunction) -> None:
    """Refuse, after a trace, a traced value that the function has kept anywhere."""
    for capture in find_captures(function):
        if any(isinstance(array, Tracer) for array in find_arrays(capture.value)):
            raise ValueError(
                f"The function keeps a traced value in {capture.path!r}, where Python would find no number in it, and the compiled function would "
                f"never put another. Return the value from the function, and keep what it returned."
            )


def check_captured_iterators(function: UserFunction) -> None:
    """Refuse a captured iterator: a compiled function takes from it once, and has the same item for good."""
    for capture in find_captures(function):
        if isinstance(capture.value, Iterator) and not isinstance(capture.value, io.IOBase):
            raise ValueError(
                f"The function finds the iterator {capture.path!r} by its name. Compiled, it would take from it once, when it is traced, and "
                f"have the same in every call. Take from it outside, and pass what it gives as an argument: next({capture.path})."
            )
