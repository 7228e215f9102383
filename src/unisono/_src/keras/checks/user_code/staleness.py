"""Whether a function's captured values have changed since its trace.

Python's `==` would count too much as equal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from unisono._src.keras.checks.user_code.captures import COLLECTION_TYPES, MOST_ITEMS, VALUE_TYPES, Capture
from unisono._src.keras.replica.replicated import Replicated
from unisono._src.typing import UserObject

MOST_BYTES = 2**14
"""The most bytes of a NumPy array whose values are compared. A larger one is compared by identity."""


def make_exact_key(number: object) -> Hashable:
    """Build a key that tells 1 from True, and 0.0 from -0.0."""
    return type(number), number.hex() if isinstance(number, float) else number


class IdentityKey:
    """A key that compares an object by identity, and keeps it alive."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


class CaptureSnapshot:
    """Values that a function captured when it was traced. The compiled program would not see values that are put there later."""

    def __init__(self, find_captures: Callable[[], list[Capture]], before: CaptureSnapshot | None = None) -> None:
        """Keep the values that a function captures now.

        `before` are the values of before the trace. Arrays, lists and dicts that changed in the trace, as in code that counts its
        traces, are compared by identity alone.
        """
        self._find_captures = find_captures
        self._changed_by_code: list[UserObject] = []
        if before is not None:
            changed = [
                then.thing
                for _, then in before._values
                if isinstance(then, CollectionSnapshot | ArraySnapshot) and not is_same_value(then.thing, then)
            ]
            self._changed_by_code = [*before._changed_by_code, *changed]
        skipped = frozenset(map(id, self._changed_by_code))
        self._values = [(capture, snapshot_value(capture.value, skipped)) for capture in find_captures()]

    def take_again(self) -> CaptureSnapshot:
        """Take a snapshot of now, after the trace."""
        return CaptureSnapshot(self._find_captures, self)

    @property
    def is_unchanged(self) -> bool:
        return not [then for capture, then in self._values if not is_same_value(capture.value, then)]


class CollectionSnapshot(NamedTuple):
    """A list or a dict, and its items at the trace. Code may change the items."""

    thing: UserObject
    items: Mapping[object, object]

    @property
    def size(self) -> int:
        return sum(item.size if isinstance(item, CollectionSnapshot) else 1 for item in self.items.values())


class ArraySnapshot(NamedTuple):
    """An array of NumPy, and its bytes at the trace. It may be inside of a `Replicated`. Code may write into the array."""

    thing: UserObject
    content: bytes


def find_small_array(value: object) -> np.ndarray | None:
    """Find the small array that code may write into. It is small because it is compared at every step.

    None where JAX has no such dtype: it converts an array once, and keeps the result.
    """
    array: object = value.value if isinstance(value, Replicated) else value
    if not isinstance(array, np.ndarray) or array.nbytes > MOST_BYTES or array.dtype.kind not in "biufc":
        return None
    return array if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype else None


def snapshot_value(value: UserObject, skipped: frozenset[int]) -> object:
    """Copy a small array or a collection; return other values. Those with the ids `skipped` are not copied."""
    array = find_small_array(value)
    if array is not None and id(value) not in skipped:
        return ArraySnapshot(value, array.tobytes())
    if not isinstance(value, COLLECTION_TYPES) or len(value) > MOST_ITEMS or id(value) in skipped:
        return value
    snapshot = CollectionSnapshot(
        value, {key: snapshot_value(item, skipped | {id(value)}) for key, item in find_items(value).items()}
    )
    return snapshot if snapshot.size <= MOST_ITEMS else value  # it is looked through at every step


def find_items(collection: UserObject) -> Mapping[object, object]:
    """The items of a collection, by their positions or keys."""
    return collection if isinstance(collection, dict) else dict(enumerate(collection))


def is_same_value(now: object, then: object) -> bool:
    """Whether a value, with its items, is the one of the trace."""
    if isinstance(then, ArraySnapshot):
        array = find_small_array(now)
        return now is then.thing and array is not None and array.tobytes() == then.content
    if isinstance(then, CollectionSnapshot):
        items = find_items(now) if now is then.thing else {}
        return (
            now is then.thing
            and items.keys() == then.items.keys()
            and all(is_same_value(items[key], item) for key, item in then.items.items())
        )
    return now is then or (isinstance(now, VALUE_TYPES) and make_exact_key(now) == make_exact_key(then))
