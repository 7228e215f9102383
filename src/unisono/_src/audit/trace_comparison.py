"""Two traces of a script beside each other: the lines whose values differ."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import NamedTuple

from unisono._src.audit.script_trace.value_digest import OPAQUE, SET
from unisono._src.typing import Json


class Place(NamedTuple):
    """A line of the user's, in a function."""

    file: str
    line: int
    function: str


@dataclasses.dataclass(frozen=True)
class ProcessTrace:
    """The notes of one process of a run."""

    content: Json

    @property
    def lines(self) -> dict[Place, Json]:
        return {Place(*entry["place"]): entry for entry in self.content["lines"]}

    def list_variable_places(self, path: str, step: int) -> list[Place]:
        """Return the user's lines, the innermost first, that last made or assigned a variable before a step."""
        events = [event for event in self.content["variables"] if event["path"] == path and event["step"] <= step]
        assigned = [event for event in events if event["action"] == "assigned" and event["step"] == step]
        chosen = (assigned or [event for event in events if event["action"] == "made"] or events)[-1:]
        return [Place(*place) for event in chosen for place in event["places"]]

    def list_call_places(self, step: int) -> list[Place]:
        """Return the user's lines, the innermost first, that called a step."""
        numbers = [int(number) for number in self.content["calls"] if int(number) <= step]
        return [Place(*place) for place in self.content["calls"][str(max(numbers))]] if numbers else []


def read_trace(path: pathlib.Path) -> ProcessTrace:
    return ProcessTrace(json.loads(path.read_text()))


class TraceComparison:
    """The lines of two traces that differ."""

    def __init__(self, one: ProcessTrace, other: ProcessTrace) -> None:
        self.one = one
        self.other = other
        ones = one.lines
        others = other.lines
        self.order = {place: entry["order"] for place, entry in (others | ones).items()}
        self.in_one_only = ones.keys() ^ others.keys()
        self._differing_names = {
            place: compare_values(ones[place]["values"], others[place]["values"]) for place in ones.keys() & others.keys()
        }
        self.sets = {
            name
            for entry in ones.values()
            for name, values in entry["values"].items()
            if any(value.startswith(SET) for value in values)
        }
        """Names that had a set as their value."""

    def list_differing_names(self, place: Place) -> set[str]:
        """Return the names that get other values on a line; `RETURNED` and `HANDED` for what a function returns."""
        return self._differing_names.get(place, set())

    def list_differing_places(self) -> list[Place]:
        """Return the lines whose values differ, in the order in which they came first."""
        return sorted((place for place, names in self._differing_names.items() if names), key=self.order.__getitem__)


def compare_values(ones: dict[str, list[str]], others: dict[str, list[str]]) -> set[str]:
    """Return the names whose values differ, as far as both runs have them."""
    return {
        name
        for name in ones.keys() & others.keys()
        if any(mine != its and OPAQUE not in (mine, its) for mine, its in zip(ones[name], others[name], strict=False))
    }
