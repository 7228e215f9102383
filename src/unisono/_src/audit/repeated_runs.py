"""Two runs that differ, repeated with their lines noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from unisono._src.audit.record_comparison import find_difference
from unisono._src.audit.script_run import FinishedRun, ScriptRunner
from unisono._src.audit.trace_comparison import ProcessTrace, read_trace

Say: TypeAlias = Callable[[str], None]
"""Called with a line for each run that begins."""


def repeat_traced(runner: ScriptRunner, one: FinishedRun, other: FinishedRun, say: Say) -> list[FinishedRun]:
    """Repeat two runs with their lines noted, as far as they were made here, and return the repetitions."""
    repeated: list[FinishedRun] = []
    for run in (one, other):
        if run.exit_code is not None:
            say(f"{run.plan.name}, to see why")
            repeated.append(runner.run(run.plan, name_traced(run), is_traced=True))
    return repeated


def has_bits_of_other(one: FinishedRun, other: FinishedRun, repeated: Sequence[FinishedRun]) -> bool:
    """Return whether the first run, repeated, has the bits of the other one, from which it differed: something that lasts has changed."""
    if one.exit_code is None or not other.records or not repeated[0].records:
        return False
    return find_difference(repeated[0].records[0], other.records[0], len(other.steps)) is None


def read_traced(runner: ScriptRunner, run: FinishedRun, process: int) -> ProcessTrace | None:
    """Return the trace of a process of a run that was repeated; None where there is none, as of a record that was made elsewhere."""
    path = runner.folder / name_traced(run) / f"trace-{process}.json"
    return read_trace(path) if run.exit_code is not None and path.exists() else None


def name_traced(run: FinishedRun) -> str:
    return f"traced-{run.directory.name}"
