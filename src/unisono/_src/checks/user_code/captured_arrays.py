"""What a function finds around it that must not reach what is compiled: arrays without being arguments, iterators, traced values."""

from __future__ import annotations

import collections
import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import keras
from jax.core import Tracer

from unisono._src.checks.user_code.captures import is_of_user, places
from unisono._src.distributed.replicated import Replicated, is_array

MOST_ITEMS_IN_LISTS = 1024


def arrays_around(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """(how the code calls it, an array) for each array that the function, or one that it calls, may find by a name, traced numbers
    among them."""
    return [
        (place.path, array) for place in places(function) if place.holds_data for array in arrays_in(place.value) if counts(array)
    ]


def replicated_around(function: Callable[..., Any]) -> list[Any]:
    """The arrays of what is found there and is meant to be the same for all."""
    found = [leaf for place in places(function) for leaf in leaves_in(place.value) if isinstance(leaf, Replicated)]
    return [array for replicated in found for array in jax.tree.leaves(replicated)]


def arrays_in(value: Any) -> Iterator[Any]:
    return (leaf for leaf in leaves_in(value) if is_array(leaf) and not isinstance(leaf, Replicated))


def leaves_in(value: Any) -> Iterator[Any]:
    """A value, or what is in it, however deep; of long lists some."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple | collections.deque | set):
        yield value
        return
    for item in itertools.islice(value, MOST_ITEMS_IN_LISTS):
        yield from leaves_in(item)


def gives_around(function: Callable[..., Any]) -> bool:
    """Whether the function finds something that may give it arrays which no name leads to."""
    return any(place.holds_data and gives_items(place.value) for place in places(function))


def gives_items(value: Any) -> bool:
    """Iterators, and objects of the user's classes that have items."""
    kind = type(value)
    return isinstance(value, Iterator | keras.utils.PyDataset) or (hasattr(kind, "__getitem__") and is_of_user(kind.__module__))


def counts(array: Any) -> bool:
    return bool(len(array.shape)) or isinstance(array, Tracer)


def check_nothing_left(function: Callable[..., Any]) -> None:
    """After a trace: a value that stands for what will be computed must not have been kept anywhere."""
    for place in places(function):
        if any(isinstance(array, Tracer) for array in arrays_in(place.value)):
            raise ValueError(
                f"The function keeps a traced value in {place.path!r}, where Python would find no number in it, and the compiled function would "
                f"never put another. Return the value from the function, and keep what it returned."
            )


def check_iterators(function: Callable[..., Any]) -> None:
    """What a compiled function takes from an iterator it takes once, and has for good."""
    for place in places(function):
        if isinstance(place.value, Iterator) and not isinstance(place.value, io.IOBase):
            raise ValueError(
                f"The function finds the iterator {place.path!r} by its name. Compiled, it would take from it once, when it is traced, and "
                f"have the same in every call. Take from it outside, and pass what it gives as an argument: next({place.path})."
            )
