"""Values that a function captured when it was traced, and whether they are still the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from unisono._src.checks.user_code.captures import COLLECTIONS, MOST_ITEMS, places
from unisono._src.checks.user_code.identity import NUMBERS, by_value
from unisono._src.typing import UserFunction, UserObject


class Surroundings:
    """Values that a function captured when it was traced: the compiled program would not see values that are put there later."""

    def __init__(self, function: UserFunction, before: Surroundings | None = None) -> None:
        """Keep the values that the function captures now.

        `before` are the values of before the trace. Lists and dicts that changed in the trace, as in code that counts its traces, are compared
        by identity alone.
        """
        self._changed_by_code: list[UserObject] = []
        if before is not None:
            changed = [then.thing for _, then in before._values if isinstance(then, Kept) and not is_same(then.thing, then)]
            self._changed_by_code = [*before._changed_by_code, *changed]
        self._values = [(capture, kept(capture.value, frozenset(map(id, self._changed_by_code)))) for capture in places(function)]

    @property
    def unchanged(self) -> bool:
        return all(is_same(capture.value, then) for capture, then in self._values)


class Kept(NamedTuple):
    """A list or a dict, and its items at the trace: code may change the items."""

    thing: UserObject
    items: Mapping[object, object]

    @property
    def size(self) -> int:
        return sum(item.size if isinstance(item, Kept) else 1 for item in self.items.values())


def kept(value: UserObject, skipped: frozenset[int]) -> object:
    """Return a value, or a copy of a list or dict with its items. Those with the ids `skipped` are not copied."""
    if not isinstance(value, COLLECTIONS) or len(value) > MOST_ITEMS or id(value) in skipped:
        return value
    snapshot = Kept(value, {key: kept(item, skipped | {id(value)}) for key, item in find_items(value).items()})
    return snapshot if snapshot.size <= MOST_ITEMS else value  # it is looked through at every step


def find_items(collection: UserObject) -> Mapping[object, object]:
    """Return the items of a list, tuple, deque or dict, by their positions or keys."""
    return collection if isinstance(collection, dict) else dict(enumerate(collection))


def is_same(now: object, then: object) -> bool:
    """Return whether a value is the one of the trace, with the same items."""
    if isinstance(then, Kept):
        items = find_items(now) if now is then.thing else {}
        return (
            now is then.thing
            and items.keys() == then.items.keys()
            and all(is_same(items[key], item) for key, item in then.items.items())
        )
    return now is then or (isinstance(now, NUMBERS) and by_value(now) == by_value(then))
