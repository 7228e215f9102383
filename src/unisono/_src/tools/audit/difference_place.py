"""Where two runs part. It is the row, the variable, or the equation of the step's program, from the details of their records."""

from __future__ import annotations

from collections.abc import Sequence

from unisono._src.keras.record.first_values import format_values
from unisono._src.tools.audit.audit_report import Place
from unisono._src.tools.audit.program_comparison import find_callback, find_equation
from unisono._src.tools.records.record_comparison import ENTRY, MADE_BY_STEP, ROWS, RecordDifference
from unisono._src.tools.records.run_record import RunRecord
from unisono._src.typing import Json

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
