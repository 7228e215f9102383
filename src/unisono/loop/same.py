"""The same object, not an equal one, as a key."""

from __future__ import annotations

from typing import Any


class Same:
    """Compares by identity, and keeps what it stands for alive."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
