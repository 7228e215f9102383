"""The comparison of two records. It finds the first step, kind and variable in which they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unisono._src.tools.records.run_record import RecordedStep, RunRecord, Variable
from unisono._src.typing import Json

ROWS = "rows"
ENTRY = "entry"
GRADIENT = "gradient"
WEIGHT = "weight"
STATE = "state"
OPTIMIZER = "optimizer"
STEPS = "steps"

MADE_BY_STEP = (GRADIENT, WEIGHT, STATE, OPTIMIZER)
"""The kinds of what a step makes, in the order in which it makes them."""

KIND_WORDS = {
    ROWS: "the rows of the global batch",
    ENTRY: "the state before the step",
    GRADIENT: "the gradient",
    WEIGHT: "the weights after the step",
    STATE: "the state of layers after the step",
    OPTIMIZER: "the optimizer's state after the step",
    STEPS: "the number of steps",
}
"""What differs, as reports say it."""

Digests = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class RecordDifference:
    """The first difference of two records."""

    step: int
    """The number of the step, from 0 on."""
    kind: str
    """What differs: one of `KIND_WORDS`."""
    variables: tuple[str, ...] = ()
    """The paths of all variables of this kind that differ, in their order."""
    has_other_shapes: bool = False
    """Whether shapes differ: those of variables, or the number of rows."""


def find_difference(one: RunRecord, other: RunRecord, most_steps: int) -> RecordDifference | None:
    """Find the first difference of two records in their first steps. It is None if all that both recorded is the same."""
    ones = one.steps
    others = other.steps
    before: tuple[RecordedStep, RecordedStep] | None = None
    for number in range(most_steps):
        if number not in ones and number not in others:
            return None
        if number not in ones or number not in others:
            return RecordDifference(number, STEPS)
        difference = compare_steps(ones[number], others[number], before)
        if difference is not None:
            return difference
        before = ones[number], others[number]
    return None


def compare_steps(
    one: RecordedStep, other: RecordedStep, before: tuple[RecordedStep, RecordedStep] | None
) -> RecordDifference | None:
    """Find the first difference of two steps. The order is that in which a step reads and computes things."""
    number = one.number
    if one.row_digests != other.row_digests or one.rows != other.rows:
        return RecordDifference(number, ROWS, has_other_shapes=one.rows != other.rows)
    ours = one.program.variables
    theirs = other.program.variables
    reshaped = [mine.path for mine, its in zip(ours, theirs, strict=False) if (mine.kind, mine.shape) != (its.kind, its.shape)]
    if reshaped or len(ours) != len(theirs):
        longer = max(ours, theirs, key=len)
        added = [variable.path for variable in longer[min(len(ours), len(theirs)) :]]
        return RecordDifference(number, ENTRY, tuple(reshaped or added), has_other_shapes=True)
    entered = list_entry_differences(one, other, before)
    if entered:
        return RecordDifference(number, ENTRY, entered)
    for kind in MADE_BY_STEP:
        paths = list_differing_paths(ours, one.digests, other.digests, kind)
        if paths:
            return RecordDifference(number, kind, paths)
    return None


def list_differing_paths(variables: Sequence[Variable], ones: Digests, others: Digests, kind: str) -> tuple[str, ...]:
    """List the paths of a kind's variables whose digests differ."""
    rows = zip(variables, ones, others, strict=True)
    return tuple(variable.path for variable, mine, its in rows if variable.kind == kind and mine != its)


def list_entry_differences(
    one: RecordedStep, other: RecordedStep, before: tuple[RecordedStep, RecordedStep] | None
) -> tuple[str, ...]:
    """List the variables that differ before the step, by path.

    A record has this state only where no step has made it; else it is what the step before has left.
    """
    if one.entry is None and other.entry is None:
        return ()
    ones = one.entry or (leave_out_gradients(before[0]) if before else None)
    others = other.entry or (leave_out_gradients(before[1]) if before else None)
    if ones is None or others is None or len(ones) != len(others):
        return ()
    state = [variable for variable in one.program.variables if variable.kind != GRADIENT]
    return tuple(variable.path for variable, mine, its in zip(state, ones, others, strict=True) if mine != its)


def leave_out_gradients(step: RecordedStep) -> Digests:
    pairs = zip(step.program.variables, step.digests, strict=True)
    return tuple(digest for variable, digest in pairs if variable.kind != GRADIENT)


def list_fact_differences(ones: Json, others: Json, name: str = "") -> list[str]:
    """List the differences of two runs' facts, in words."""
    if isinstance(ones, dict) and isinstance(others, dict):
        keys = [key for key in ones if key in others]
        return [words for key in keys for words in list_fact_differences(ones[key], others[key], f"{name}.{key}".strip("."))]
    return [] if ones == others else [f"{name} is {ones!r} there and {others!r} here"]
