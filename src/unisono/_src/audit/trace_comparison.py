"""Two traces of a script beside each other: the lines whose values differ."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from unisono._src.audit.script_trace.value_digest import OPAQUE, SET
from unisono._src.typing import Json

NotedValues: TypeAlias = Mapping[str, Sequence[tuple[int, str]]]
"""By name, (moment, digest) of the values that a line gave it."""


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
        self.in_one_only = ones.keys() ^ others.keys()
        self.in_both = ones.keys() & others.keys()
        self._differing_names = {place: compare_values(ones[place]["values"], others[place]["values"]) for place in self.in_both}
        """By line, the moments of the first run at which a name first gets another value."""
        self.order = {place: entry["begin"] for place, entry in (others | ones).items()} | {
            place: min(moments.values()) for place, moments in self._differing_names.items() if moments
        }
        """The moment at which each line first gets another value, or of lines that never do came first."""
        self.sets = {
            name
            for entry in ones.values()
            for name, values in entry["values"].items()
            if any(digest.startswith(SET) for _, digest in values)
        }
        """Names that had a set as their value."""

    def list_differing_names(self, place: Place) -> set[str]:
        """Return the names that get other values on a line; `RETURNED` and `HANDED` for what a function returns."""
        return set(self._differing_names.get(place, ()))

    def could_precede(self, place: Place, later: Place) -> bool:
        """Return whether the difference of a line can be the origin of a later line's: it must not come after it."""
        return not self._differing_names.get(later) or self.order[place] <= self.order[later]

    def list_differing_places(self) -> list[Place]:
        """Return the lines whose values differ, in the order in which they first do."""
        return sorted((place for place, names in self._differing_names.items() if names), key=self.order.__getitem__)


def compare_values(ones: NotedValues, others: NotedValues) -> dict[str, int]:
    """Return the names whose values differ, as far as both runs have them, with the moment of the first run at which they first do."""
    moments = {name: find_first_moment(ones[name], others[name]) for name in ones.keys() & others.keys()}
    return {name: moment for name, moment in moments.items() if moment is not None}


def find_first_moment(ones: Sequence[tuple[int, str]], others: Sequence[tuple[int, str]]) -> int | None:
    """Return the moment of the first run at which two values of a name first differ; None where none do."""
    pairs = zip(ones, others, strict=False)
    return next((moment for (moment, mine), (_, its) in pairs if mine != its and OPAQUE not in (mine, its)), None)
