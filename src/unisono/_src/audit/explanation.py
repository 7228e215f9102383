"""The explanation of a difference: where two runs part, and why."""

from __future__ import annotations

from collections.abc import Callable

from unisono._src.audit.cause import Cause
from unisono._src.audit.record_comparison import RecordDifference
from unisono._src.audit.report import Difference
from unisono._src.audit.script_run import FinishedRun, ScriptRunner


def explain_difference(
    runner: ScriptRunner, one: FinishedRun, other: FinishedRun, found: RecordDifference, say: Callable[[str], None]
) -> Difference:
    return Difference((one.plan.name, other.plan.name), found.step + 1, found.kind, next(iter(found.variables), None), None, None, None, None, Cause.UNKNOWN, "", "", differing=found.variables)


def explain_failure(runner: ScriptRunner, one: FinishedRun, other: FinishedRun, say: Callable[[str], None]) -> Difference:
    return Difference((one.plan.name, other.plan.name), len(other.steps) + 1, "exit", None, None, None, None, None, Cause.UNKNOWN, "", "")
