"""Keys that are equal for one object, or for one number, where Python's `==` says too much."""

from __future__ import annotations

from collections.abc import Hashable

VALUE_TYPES = (bool, int, float, str, bytes)
"""Types of numbers and texts, which are compared by value."""


def make_exact_key(number: object) -> Hashable:
    """Return a key that tells 1 from True, and 0.0 from -0.0."""
    return type(number), number.hex() if isinstance(number, float) else number


class IdentityKey:
    """A key that compares an object by identity, and keeps the object alive."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
