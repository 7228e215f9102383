"""Names for the types of what is passed around: arrays, trees of arrays, shapes, states of a step, batches. And what tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard

import jax
import numpy as np
from jax.core import Tracer

Array: TypeAlias = jax.Array
"""An array on a device, or a tracer of one."""

HostArray: TypeAlias = np.ndarray
"""An array in the host's memory."""

AnyArray: TypeAlias = jax.Array | np.ndarray
"""An array, wherever it lies."""

PyTree: TypeAlias = Any
"""An array, or nested lists, tuples and dicts of arrays. Type checkers cannot tell more of a tree."""

Shape: TypeAlias = tuple[int, ...]
"""Sizes of the dimensions of an array."""

Values: TypeAlias = list[Any]
"""Arrays, one for each of a list of variables."""

Logs: TypeAlias = dict[str, Any]
"""What a step says: numbers by their names, nested where a model nests them."""

Outputs: TypeAlias = PyTree
"""What a model or a function of the user's returns."""

UserBatch: TypeAlias = PyTree
"""What a source of data yields: arrays with a row for each example, alone or in a structure."""

UserObject: TypeAlias = Any
"""Whatever the user gives, before it is known what it is."""

UserFunction: TypeAlias = Callable[..., Any]
"""A function of the user's."""

KerasObject: TypeAlias = Any
"""An object that Keras makes and publishes no type of: a data adapter, a compiled loss, a tracker."""

Json: TypeAlias = Any
"""What JSON can hold."""

Config: TypeAlias = Mapping[str, Any]
"""What a Keras object says of its configuration."""

Arguments: TypeAlias = tuple[Any, ...]
"""Positional arguments that are handed on as they are."""

Keywords: TypeAlias = dict[str, Any]
"""Keyword arguments that are handed on as they are."""


class LibraryArray(Protocol):
    """An array of any library."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> Any: ...

    def __array__(self) -> np.ndarray: ...


def is_plain_array(thing: object) -> TypeGuard[AnyArray]:
    """Return whether this is an array of JAX or of NumPy."""
    return isinstance(thing, jax.Array | np.ndarray)


def is_traced(thing: object) -> TypeGuard[Array]:
    """Return whether this is an array of a trace."""
    return isinstance(thing, Tracer)


def is_dict(thing: object) -> TypeGuard[dict[str, PyTree]]:
    return isinstance(thing, dict)


def is_tuple(thing: object) -> TypeGuard[tuple[PyTree, ...]]:
    return isinstance(thing, tuple)


def is_list_or_tuple(thing: object) -> TypeGuard[Sequence[PyTree]]:
    return isinstance(thing, list | tuple)
