"""A dict of bounded size.

It is for what is compiled, and for counts of compilations.
"""

from __future__ import annotations

import collections
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_COUNTS = 1024
REMADE = 3
"""The number of compilations of one line of code, or for the same arrays, that is warned of: nobody means so many."""


class RecentItems(collections.OrderedDict[Key, Value]):
    """A dict that forgets its oldest items. An item is as old as when it was set, or moved to the end."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


def count_event(counts: RecentItems[Key, int], key: Key) -> int:
    """Count the calls with the key, this one included."""
    counts[key] = counts.get(key, 0) + 1
    return counts[key]
