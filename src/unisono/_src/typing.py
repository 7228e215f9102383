"""Names for the types of what is passed around.

Arrays, trees of arrays, shapes, states of a step, batches. And what tells them apart.
"""

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
"""The numbers of a step by their names, nested as a model nests them."""

Outputs: TypeAlias = PyTree
"""The outputs of a model or of a user's function."""

UserBatch: TypeAlias = PyTree
"""A batch of a data source: arrays with a row for each example, alone or in a structure."""

UserObject: TypeAlias = Any
"""An argument of the user's, before its type is known."""

UserFunction: TypeAlias = Callable[..., Any]
"""A function of the user's."""

KerasObject: TypeAlias = Any
"""An object of Keras without a public type: a data adapter, a compiled loss, a tracker."""

Json: TypeAlias = Any
"""A value that JSON can hold."""

Config: TypeAlias = Mapping[str, Any]
"""The configuration of a Keras object."""

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
    """Whether this is an array of JAX or of NumPy."""
    return isinstance(thing, jax.Array | np.ndarray)


def is_traced(thing: object) -> TypeGuard[Array]:
    """Whether this is an array of a trace."""
    return isinstance(thing, Tracer)


def is_dict(thing: object) -> TypeGuard[dict[str, PyTree]]:
    return isinstance(thing, dict)


def is_tuple(thing: object) -> TypeGuard[tuple[PyTree, ...]]:
    return isinstance(thing, tuple)


def is_list_or_tuple(thing: object) -> TypeGuard[Sequence[PyTree]]:
    return isinstance(thing, list | tuple)
