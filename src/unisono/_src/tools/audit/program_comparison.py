"""Two recorded programs beside each other: the first equation that differs."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import NamedTuple

from unisono._src.keras.record.traced_program import format_constants, format_equation
from unisono._src.tools.audit.audit_report import Place, Source
from unisono._src.tools.records.run_record import RunRecord
from unisono._src.typing import Json

COMPARED = ("primitive", "operands", "params", "shapes")
CALLBACKS = ("pure_callback", "io_callback")


class EquationPair(NamedTuple):
    """An equation of either program, and the line of the first one."""

    mine: Json
    its: Json
    line: Json
    """The user's line that the equation comes from, or the nearest such line before it. None if there is none."""

    def describe(self) -> Place:
        """Describe where the two differ. It is in their constants, in their parameters, or as a whole."""
        ours, theirs = map(format_equation, (self.mine, self.its))
        values = None
        if ours != theirs:
            ours = f"{ours}; in the other run {theirs}"
        elif self.mine["operands"] != self.its["operands"]:
            values = format_constants(self.mine), format_constants(self.its)
        else:
            values = format_other_params(self.mine, self.its), format_other_params(self.its, self.mine)
        return Place(self.mine["layer"], equation=ours, source=quote_line(self.line), values=values)


def find_equation(one: RunRecord, other: RunRecord, step: int) -> EquationPair | None:
    """Find the first equation that differs, in programs up to a step. It is None if all are the same."""
    for ones, others in pair_programs(list_programs(one, step), list_programs(other, step)):
        pair = compare_equations(ones, others)
        if pair is not None:
            return pair
    return None


def list_programs(record: RunRecord, step: int) -> list[Json]:
    """List the programs that were traced up to a step. Each is a list of equations."""
    return [detail["equations"] for detail in record.details if detail["of"] == "program" and detail["step"] <= step]


def pair_programs(ones: Sequence[Json], others: Sequence[Json]) -> list[tuple[Json, Json]]:
    """Pair the programs to compare.

    Programs of the same shapes are paired first, then the others in order. A process traces programs for its own replicas alone.
    They may have fewer rows than the replicas of another process.
    """
    left = list(ones)
    pairs: list[tuple[Json, Json]] = []
    unpaired: list[Json] = []
    for its in others:
        mine = next((each for each in left if list_shapes(each) == list_shapes(its)), None)
        if mine is None:
            unpaired.append(its)
        else:
            left.remove(mine)
            pairs.append((mine, its))
    return pairs + list(zip(left, unpaired, strict=False))


def list_shapes(equations: Sequence[Json]) -> list[list[str]]:
    return [equation["shapes"] for equation in equations]


def compare_equations(ones: Sequence[Json], others: Sequence[Json]) -> EquationPair | None:
    """Find the first equation that differs.

    If the shapes of the rows differ throughout, an equation with a line of the user's comes first.
    """
    differing = [
        (index, mine, its)
        for index, (mine, its) in enumerate(zip(ones, others, strict=False))
        if any(mine[part] != its[part] for part in COMPARED)
    ]
    if not differing:
        return None
    index, mine, its = next((each for each in differing if each[1]["line"]), differing[0])
    return EquationPair(mine, its, next((each["line"] for each in reversed(ones[: index + 1]) if each["line"]), None))


def find_callback(record: RunRecord, step: int) -> Place | None:
    """Find the first equation that calls Python back. It is None if there is none."""
    calls = (equation for program in list_programs(record, step) for equation in program if equation["primitive"] in CALLBACKS)
    return next((Place(call["layer"], equation=format_equation(call), source=quote_line(call["line"])) for call in calls), None)


def format_other_params(mine: Json, its: Json) -> str:
    """Format the parameters that another equation has with other values."""
    return ", ".join(f"{name}={value}" for name, value in mine["params"].items() if its["params"].get(name) != value)


def quote_line(line: Json) -> Source | None:
    """Read a line of the user's, as reports quote it."""
    if line is None:
        return None
    file, number, function = line
    return Source(file, number, linecache.getline(file, number).strip(), function)
