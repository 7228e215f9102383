"""Record files of a run: read, and compared with those of another run."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from unisono._src.engine.state import list_told
from unisono._src.keras.record import record_file
from unisono._src.keras.record.record_file import Steps
from unisono._src.typing import Json


class Variable(NamedTuple):
    """A variable with a digest in each step."""

    kind: str
    """"gradient", "weight", "state" or "optimizer"."""
    path: str
    shape: tuple[int, ...]


class Program(NamedTuple):
    """A program that trains."""

    name: str
    variables: list[Variable]
    arrays: int
    """The arrays of its batches."""
    facts: Json
    """What the bits of the run depend on."""
    placement: Json
    """The number of devices of each process, and the number of processes."""


class RecordedStep(NamedTuple):
    """One step of a record."""

    number: int
    program: Program
    position: tuple[int, int]
    """Pass and batch of the pass; -1 if the batch has no position."""
    rows: int
    loss: float | None
    """None if the step does not tell its loss."""
    row_digests: tuple[tuple[int, int], ...]
    digests: tuple[tuple[int, int], ...]
    entry: tuple[tuple[int, int], ...] | None = None
    """The digests of the entry of the step, without gradients, if no step has made it."""


class Start(NamedTuple):
    """A process that began the run, or went on with it."""

    first: int
    """The number of its first step."""
    command: list[str]
    time: float
    steps: dict[int, RecordedStep]


class RunRecord(NamedTuple):
    """The record of a run."""

    directory: Path
    starts: list[Start]
    """From the last start at step 0 on: an earlier run in the same directory is left out."""
    details: Sequence[Json] = ()
    """What the run noted by `RunDetails`, in order; nothing where none were asked for."""

    @property
    def steps(self) -> dict[int, RecordedStep]:
        """All steps by number, in order. A step that was taken again after a resume counts as it was the last time."""
        merged = {number: step for start in self.starts for number, step in start.steps.items()}
        return dict(sorted(merged.items()))


def read_run_record(directory: str | os.PathLike[str]) -> RunRecord:
    """Read the record in a directory. A directory without one is refused."""
    directory = Path(directory)
    path = directory / record_file.NAME
    if not path.exists():
        raise FileNotFoundError(
            f"{os.fspath(directory)!r} holds no record of a run: there is no file {record_file.NAME}. Record a run by "
            f"UNISONO_RECORD={os.fspath(directory)} before the command, or by un.callbacks.Record({os.fspath(directory)!r})."
        )
    starts: list[Start] = []
    programs: list[Program] = []
    entries: dict[int, tuple[tuple[int, int], ...]] = {}
    details: list[Json] = []
    for _, content in record_file.iterate_frames(path):
        kind = content[:1]
        if kind == record_file.BEGIN:
            start = read_start(path, json.loads(content[1:]))
            programs = []
            starts, details = ([start], []) if start.first == 0 else ([*starts, start], details)
        elif kind == record_file.PROGRAM:
            programs.append(read_program(json.loads(content[1:])))
        elif kind == record_file.ENTRY:
            entries[record_file.read_place(content)[1]] = freeze_digests(record_file.read_entry(content).tolist())
        elif kind == record_file.DETAIL:
            details.append(json.loads(content[1:]))
        elif starts:
            program = programs[record_file.read_place(content)[0]]
            steps = list_steps(program, record_file.read_steps(content, program.arrays, len(program.variables)))
            starts[-1].steps.update({step.number: step._replace(entry=entries.pop(step.number, None)) for step in steps})
    return RunRecord(directory, starts, details)


def read_start(path: Path, content: Json) -> Start:
    if content["format"] > record_file.FORMAT:
        raise ValueError(
            f"{path} has the format {content['format']}, and this version of Unisono reads formats up to {record_file.FORMAT}. Read it with the "
            f"version that wrote it, or a newer one."
        )
    return Start(content["first"], content["command"], content["time"], {})


def read_program(content: Json) -> Program:
    variables = [Variable(kind, path, tuple(shape)) for kind, path, shape in content["variables"]]
    return Program(content["name"], variables, content["arrays"], content["facts"], content["placement"])


def list_steps(program: Program, steps: Steps) -> list[RecordedStep]:
    """List the steps of a frame, one by one."""
    columns = (steps.positions, steps.rows, steps.row_digests, steps.digests)
    rows = zip(*(column.tolist() for column in columns), list_told(steps.losses), strict=True)
    return [
        RecordedStep(
            steps.first + index,
            program,
            (position[0], position[1]),
            count,
            loss,
            freeze_digests(of_rows),
            freeze_digests(of_variables),
        )
        for index, (position, count, of_rows, of_variables, loss) in enumerate(rows)
    ]


def freeze_digests(digests: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((first, second) for first, second in digests)


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
