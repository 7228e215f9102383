"""What stood around a function when it was traced, and whether it stands there still."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from unisono._src.checks.user_code.captures import COLLECTIONS, MOST_ITEMS, places
from unisono._src.checks.user_code.identity import NUMBERS, by_value


class Surroundings:
    """What stood in these places when a function was traced: what is put there later would not be seen."""

    def __init__(self, function: Callable[..., Any], before: Surroundings | None = None) -> None:
        """`before` is how it was before the trace: lists and dicts into which the code itself puts something, as code that counts its
        traces does, are not looked into."""
        self._own: list[Any] = []
        if before is not None:
            changed = [then.thing for _, then in before._then if isinstance(then, Kept) and not is_same(then.thing, then)]
            self._own = [*before._own, *changed]
        self._then = [(place, kept(place.value, frozenset(map(id, self._own)))) for place in places(function)]

    @property
    def unchanged(self) -> bool:
        return all(is_same(place.value, then) for place, then in self._then)


class Kept(NamedTuple):
    """A list or a dict, and what was in it: code may put something else into it."""

    thing: Any
    items: Mapping[Any, Any]

    @property
    def size(self) -> int:
        return sum(of.size if isinstance(of, Kept) else 1 for of in self.items.values())


def kept(value: Any, around: frozenset[int]) -> Any:
    """`around` are the ids of those that are not looked into."""
    if not isinstance(value, COLLECTIONS) or len(value) > MOST_ITEMS or id(value) in around:
        return value
    found = Kept(value, {key: kept(item, around | {id(value)}) for key, item in items_of(value).items()})
    return found if found.size <= MOST_ITEMS else value  # it is looked through at every step


def items_of(thing: Any) -> Mapping[Any, Any]:
    return thing if isinstance(thing, dict) else dict(enumerate(thing))


def is_same(now: Any, then: Any) -> bool:
    if isinstance(then, Kept):
        items = items_of(now) if now is then.thing else {}
        return (
            now is then.thing
            and items.keys() == then.items.keys()
            and all(is_same(items[key], of) for key, of in then.items.items())
        )
    return now is then or (isinstance(now, NUMBERS) and by_value(now) == by_value(then))
