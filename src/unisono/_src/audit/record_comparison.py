"""The comparison of two records: the first step, kind and variable in which they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unisono._src.audit.audit_report import Divergence
from unisono._src.audit.difference_kinds import ENTRY, GRADIENT, MADE_BY_STEP, OPTIMIZER, ROWS, STEPS
from unisono._src.record.run_record import RecordedStep, RunRecord, Variable

Digests = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class RecordDifference:
    """The first difference of two records."""

    step: int
    """The number of the step, from 0 on."""
    kind: str
    """One of `difference_kinds`."""
    variables: tuple[str, ...] = ()
    """The paths of all variables of this kind that differ, in their order."""
    has_other_shapes: bool = False
    """Whether shapes differ: those of variables, or the number of rows."""


def find_difference(one: RunRecord, other: RunRecord, most_steps: int) -> RecordDifference | None:
    """Return the first difference of two records in their first steps; None where all that both recorded is the same."""
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
    """Return the first difference of two steps, by the order in which a step gets and makes things."""
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
    """Return the paths of the variables of a kind whose digests differ."""
    rows = zip(variables, ones, others, strict=True)
    return tuple(variable.path for variable, mine, its in rows if variable.kind == kind and mine != its)


def list_entry_differences(
    one: RecordedStep, other: RecordedStep, before: tuple[RecordedStep, RecordedStep] | None
) -> tuple[str, ...]:
    """Return the paths of the variables that differ in the state before the step.

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


def measure_divergence(names: tuple[str, str], one: RunRecord, other: RunRecord) -> Divergence:
    """Return, for each layer and step, the fraction of the layer's digests that differ."""
    common = sorted(one.steps.keys() & other.steps.keys())
    pairs = [(one.steps[number], other.steps[number]) for number in common]
    layers = list(dict.fromkeys(name_layer(variable) for mine, _ in pairs for variable in mine.program.variables))
    columns = [measure_step(mine, its) for mine, its in pairs]
    fractions = tuple(tuple(column.get(layer, 0.0) for column in columns) for layer in layers)
    return Divergence(names, tuple(layers), tuple(number + 1 for number in common), fractions)


def measure_step(one: RecordedStep, other: RecordedStep) -> dict[str, float]:
    """Return the fraction of digests that differ, by layer."""
    counts: dict[str, list[int]] = {}
    ours, theirs = ([(variable.kind, variable.shape) for variable in step.program.variables] for step in (one, other))
    for place, variable in enumerate(one.program.variables):
        differs = ours != theirs or one.digests[place] != other.digests[place]
        counts.setdefault(name_layer(variable), []).append(differs)
    return {layer: sum(differ) / len(differ) for layer, differ in counts.items()}


def name_layer(variable: Variable) -> str:
    """Return the layer in a variable's path; "optimizer" for the optimizer's own."""
    if variable.kind == OPTIMIZER:
        return "optimizer"
    return variable.path.rpartition("/")[0] or variable.path
