"""Keys for what is the same, where Python's `==` says too much: one object, one number."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

NUMBERS = (bool, int, float, str, bytes)
"""And texts: what is known by its value."""


def by_value(number: Any) -> Hashable:
    """Tells 1 from True, and 0.0 from -0.0."""
    return type(number), number.hex() if isinstance(number, float) else number


class Same:
    """Compares by identity, and keeps what it stands for alive."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
