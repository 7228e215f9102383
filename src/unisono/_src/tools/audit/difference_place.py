"""Where two runs part. It is the row, the variable, or the equation of the step's program, from the details of their records."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import NamedTuple

from unisono._src.keras.record.traced_program import format_constants, format_equation, format_values
from unisono._src.tools.audit.audit_report import Divergence, Place, Source
from unisono._src.tools.records import (
    ENTRY,
    MADE_BY_STEP,
    OPTIMIZER,
    ROWS,
    RecordDifference,
    RecordedStep,
    RunRecord,
    Variable,
)
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


NOWHERE = Place()


def find_place(one: RunRecord, others: Sequence[RunRecord], difference: RecordDifference) -> Place:
    """Find where two runs part.

    It is `NOWHERE` if their records do not hold it. `others` are the processes of the other run, and the first of them is the one
    that differs first. A gradient has the same bits in all processes. So a process whose program differs may differ no sooner
    than the others.
    """
    if difference.kind == ROWS:
        return find_row(one, others[0], difference.step)
    if difference.kind == ENTRY:
        return find_variable(one, others[0], difference)
    if difference.kind not in MADE_BY_STEP:
        return NOWHERE
    pairs = (find_equation(one, other, difference.step) for other in others)
    pair = next((pair for pair in pairs if pair is not None), None)
    return pair.describe() if pair is not None else find_callback(one, difference.step) or NOWHERE


def find_row(one: RunRecord, other: RunRecord, step: int) -> Place:
    """Find the first array and row that differ in a step."""
    mine, its = (find_detail(record, "rows", step) for record in (one, other))
    if mine is None or its is None or mine["step"] != step or its["step"] != step:
        return NOWHERE
    for name, ours in mine["arrays"].items():
        theirs = its["arrays"].get(name, [])
        pairs = zip(ours, theirs, strict=False)
        row = next((row for row, (left, right) in enumerate(pairs) if left[0] != right[0]), min(len(ours), len(theirs)))
        if row < min(len(ours), len(theirs)):
            values = format_pair(ours[row][1], theirs[row][1])
            return Place(array=name, row=row, replica=find_replica(mine["shards"], row), values=values)
        if len(ours) != len(theirs):
            return Place(array=name, values=(f"{len(ours)} rows", f"{len(theirs)} rows"))
    return NOWHERE


def find_replica(shards: Sequence[int], row: int) -> int | None:
    """Find the replica of a row. `shards` are the rows of each replica."""
    ends = (sum(shards[: replica + 1]) for replica in range(len(shards)))
    return next((replica for replica, end in enumerate(ends) if row < end), None)


def find_variable(one: RunRecord, other: RunRecord, difference: RecordDifference) -> Place:
    """Find the first variable that differs before a step.

    The result has its layer and values. A variable that no code has assigned is not recorded again.
    """
    path = difference.variables[0]
    details = [find_detail(record, "state", difference.step) for record in (one, other)]
    noted = [(detail["step"], *detail["variables"][path]) for detail in details if detail and path in detail["variables"]]
    layer = next((layer for _, layer, _ in noted), None)
    if difference.has_other_shapes:
        return Place(layer, values=(find_shape(one, difference.step, path), find_shape(other, difference.step, path)))
    if len(noted) < 2:
        return Place(layer)
    ours, theirs = (values if step == difference.step else None for step, _, values in noted)
    return Place(layer, values=format_pair(ours, theirs))


def find_shape(record: RunRecord, step: int, path: str) -> str:
    shapes = (variable.shape for variable in record.steps[step].program.variables if variable.path == path)
    return next((f"shape {shape}" for shape in shapes), "no such variable")


def find_detail(record: RunRecord, kind: str, step: int) -> Json | None:
    """Find the last detail of a kind up to a step. It is None if there is none."""
    found = [detail for detail in record.details if detail["of"] == kind and detail["step"] <= step]
    return max(found, key=lambda detail: detail["step"], default=None)


def format_pair(ours: Json, theirs: Json) -> tuple[str, str] | None:
    """Format the first values of both runs. It is None if these are the same, and a later value differs."""
    if ours == theirs:
        return None
    mine, its = ("what the step before left" if values is None else format_values(values) for values in (ours, theirs))
    return mine, its


def measure_divergence(names: tuple[str, str], one: RunRecord, other: RunRecord) -> Divergence:
    """Measure the fraction of digests that differ, by layer and step."""
    common = sorted(one.steps.keys() & other.steps.keys())
    pairs = [(one.steps[number], other.steps[number]) for number in common]
    layers = list(dict.fromkeys(name_layer(variable) for mine, _ in pairs for variable in mine.program.variables))
    columns = [measure_step(mine, its) for mine, its in pairs]
    fractions = tuple(tuple(column.get(layer, 0.0) for column in columns) for layer in layers)
    return Divergence(names, tuple(layers), tuple(number + 1 for number in common), fractions)


def measure_step(one: RecordedStep, other: RecordedStep) -> dict[str, float]:
    """Measure the fraction of digests that differ, by layer."""
    counts: dict[str, list[int]] = {}
    ours, theirs = ([(variable.kind, variable.shape) for variable in step.program.variables] for step in (one, other))
    for place, variable in enumerate(one.program.variables):
        differs = ours != theirs or one.digests[place] != other.digests[place]
        counts.setdefault(name_layer(variable), []).append(differs)
    return {layer: sum(differ) / len(differ) for layer, differ in counts.items()}


def name_layer(variable: Variable) -> str:
    """Cut a variable's layer from its path. The optimizer's own variables have "optimizer"."""
    if variable.kind == OPTIMIZER:
        return "optimizer"
    return variable.path.rpartition("/")[0] or variable.path
