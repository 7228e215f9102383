"""The audit of a script. It runs the script, compares the records, and explains the first difference."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Sequence

from unisono._src.tools.audit.audit_report import EXIT, AuditedRun, AuditReport, Cause, Difference, Divergence
from unisono._src.tools.audit.difference_place import measure_divergence
from unisono._src.tools.audit.explanation import explain_difference, name_cause_of_record
from unisono._src.tools.audit.script_run import FinishedRun, RunPlan, ScriptRunner, find_last_lines
from unisono._src.tools.records import RecordDifference, RecordedStep, find_difference, read_run_record
from unisono._src.typing import Json
from unisono._src.versions import list_versions

FIRST = RunPlan("as written")
AGAIN = RunPlan("as written, again", hash_seed=1)
ONCE_MORE = RunPlan("as written, once more")
"""A run with the first run's seed of `hash()`. It is made only if the second run differs, and shows whether this seed is why."""

MOST_DEVICES = 8


class AuditError(Exception):
    """An audit that cannot be made. Nothing was trained that could be compared."""


@dataclasses.dataclass(frozen=True)
class AuditSettings:
    """The options of an audit."""

    program: tuple[str, ...]
    steps: int = 20
    devices: tuple[int, ...] = ()
    """Numbers of devices; empty stands for 1, 2 and R."""
    processes: tuple[int, ...] = ()
    against: pathlib.Path | None = None
    """The directory of a record to compare with, in place of other placements."""
    limit: float = 1800.0
    """Seconds for each run."""


def audit_script(settings: AuditSettings, folder: pathlib.Path, say: Callable[[str], None]) -> AuditReport:
    """Run a script on several placements, and explain the first difference.

    Args:
        settings: The script, and what it is compared on.
        folder: An empty directory for the records.
        say: Called with a line for each run that begins.
    """
    runner = ScriptRunner(settings.program, settings.steps, folder, settings.limit)
    return Audit(runner, settings, say).make_report()


class Audit:
    """One audit: the runs so far, and what was found."""

    def __init__(self, runner: ScriptRunner, settings: AuditSettings, say: Callable[[str], None]) -> None:
        self._runner = runner
        self._settings = settings
        self._say = say
        self._runs: list[FinishedRun] = []

    def make_report(self) -> AuditReport:
        first = self._run(FIRST)
        if first.exit_code != 0 or not first.steps:
            raise AuditError(describe_failure(first))
        difference = self._compare_with_record(first) if self._settings.against else self._compare_placements(first)
        return AuditReport(
            script=next((word for word in self._settings.program if word != "-m"), ""),
            command=self._settings.program,
            versions={name: str(version) for name, version in list_versions().items()},
            replicas=first.steps[0].program.facts["replicas"],
            runs=tuple(summarize_run(run, self._settings.steps) for run in self._runs),
            difference=difference,
            divergence=self._list_divergences(first),
            warnings=list_warnings(self._runs),
        )

    def _run(self, plan: RunPlan) -> FinishedRun:
        self._say(plan.name)
        run = self._runner.run_to_end(plan, f"run-{len(self._runs)}")
        self._runs.append(run)
        return run

    def _compare_placements(self, first: FinishedRun) -> Difference | None:
        """Run the script until a run differs from the first one.

        The second run is on the same placement, all others on other placements.
        """
        again = self._run(AGAIN)
        found = self._find_difference(first, again)
        if found is not None:
            return explain_difference(first, again, *found, self._find_cause_of_repeat(first, again))
        program = first.steps[0].program
        settings = self._settings
        for plan in plan_placements(program.placement, program.facts["replicas"], settings.devices, settings.processes):
            run = self._run(plan)
            found = self._find_difference(first, run)
            if found is not None:
                return explain_difference(first, run, *found, Cause.PROCESS if plan.processes > 1 else Cause.DEVICES)
        return None

    def _find_difference(self, one: FinishedRun, other: FinishedRun) -> tuple[RecordDifference, int] | None:
        """Find the first difference of two runs, and its process.

        It is (difference, process), for the process that differs first.
        """
        if one.exit_code != other.exit_code:
            return RecordDifference(len(other.steps), EXIT), 0
        mine = one.records[:1]  # nothing where both have failed before their first steps
        found = [find_difference(first, record, self._settings.steps) for first in mine for record in other.records]
        differing = [(difference, process) for process, difference in enumerate(found) if difference is not None]
        return min(differing, key=lambda pair: pair[0].step, default=None)

    def _find_cause_of_repeat(self, first: FinishedRun, again: FinishedRun) -> Cause:
        """Find why two runs on the same placement differ. A third run is like the first, like the second, or like neither."""
        once_more = self._run(ONCE_MORE)
        if self._find_difference(first, once_more) is None:
            return Cause.HASH_ORDER
        return Cause.EARLIER_RUN if self._find_difference(again, once_more) is None else Cause.EACH_RUN

    def _compare_with_record(self, first: FinishedRun) -> Difference | None:
        assert self._settings.against is not None
        record = read_run_record(self._settings.against)
        recorded = FinishedRun(
            RunPlan(f"recorded in {self._settings.against}"), self._settings.against, None, math.nan, "", (record,)
        )
        self._runs.append(recorded)
        check_recorded(self._settings.against, recorded, first)
        difference = find_difference(record, first.records[0], min(self._settings.steps, len(recorded.steps)))
        if difference is None:
            return None
        return explain_difference(recorded, first, difference, 0, name_cause_of_record(recorded, first))

    def _list_divergences(self, first: FinishedRun) -> tuple[Divergence, ...]:
        others = [run for run in self._runs if run is not first and run.records]
        return tuple(measure_divergence((first.plan.name, run.plan.name), first.records[0], run.records[0]) for run in others)


def plan_placements(placement: Json, replicas: int, devices: Sequence[int], processes: Sequence[int]) -> list[RunPlan]:
    """Plan the runs on other placements than the first run's.

    Args:
        placement: The placement of the first run, as its record describes it.
        replicas: R of the first run, which all runs have.
        devices: Numbers of devices to run on; empty stands for 1, 2 and R.
        processes: Numbers of processes to run in; empty stands for 2, where the script's strategy is of several processes.
    """
    wanted = devices or (1, 2, min(replicas, MOST_DEVICES))
    most = replicas if placement["platform"] == "cpu" else min(replicas, placement["available"])
    counts = sorted({count for count in wanted if count <= most and count != placement["devices"]})
    plans = [RunPlan(f"{count} device{'s' * (count != 1)}", count, replicas=replicas) for count in counts]
    if not processes and placement["strategy"] == "MultiWorkerMirroredStrategy":
        processes = (2,)
    fits = placement["platform"] == "cpu" or placement["available"] > 1
    return plans + [RunPlan(f"{count} processes", 1, count, replicas) for count in processes if 1 < count <= replicas and fits]


def check_recorded(directory: pathlib.Path, recorded: FinishedRun, first: FinishedRun) -> None:
    """Refuse a recorded run that cannot be compared with the first one."""
    if not recorded.steps:
        raise AuditError(f"The record in {str(directory)!r} has no steps. Record a run that trains.")
    begin = min(recorded.steps)
    if begin:
        raise AuditError(
            f"The record in {str(directory)!r} begins with step {begin + 1} of its process, and an audit compares from step 1 on. Record the "
            f"whole program: UNISONO_RECORD=DIRECTORY python script.py."
        )
    theirs, ours = (run.steps[0].program.facts["replicas"] for run in (recorded, first))
    if theirs != ours:
        raise AuditError(
            f"The recorded run has R = {theirs}, and the script as it is written R = {ours}. Runs with another R are other trainings: "
            f"write replicas={theirs} in the strategy, or start the audit with UNISONO_REPLICAS={theirs}."
        )


def describe_failure(run: FinishedRun) -> str:
    """Describe what stopped the first run, or hinders a comparison."""
    last = find_last_lines(run.output)
    if run.exit_code:
        return f"The script ended with exit code {run.exit_code} as it is written, before anything was compared:\n\n{last}"
    return (
        "The script has trained no step that is recorded. An audit compares steps of `fit`, `train_on_batch` and `strategy.run` of models "
        f"that were made in the scope of a strategy. The run wrote:\n\n{last}"
    )


def summarize_run(run: FinishedRun, most_steps: int) -> AuditedRun:
    """Summarize a run for the report. A call may run more steps than were asked for: these are not compared, and not shown."""
    steps = list(run.steps.values())[:most_steps]
    placement = steps[0].program.placement if steps else {}
    return AuditedRun(
        name=run.plan.name,
        devices=placement.get("devices"),
        processes=placement.get("processes", run.plan.processes),
        steps=len(steps),
        exit_code=run.exit_code,
        losses=tuple(step.loss for step in steps),
        digest=digest_step(steps[-1]) if steps else None,
        seconds=run.seconds,
        end_of_output=find_last_lines(run.output) if run.exit_code else "",
    )


def digest_step(step: RecordedStep) -> str:
    """Compute a short digest of all that a step recorded."""
    return hashlib.sha256(json.dumps([step.row_digests, step.digests]).encode()).hexdigest()[:16]


def list_warnings(runs: Sequence[FinishedRun]) -> tuple[str, ...]:
    """List the warnings in the runs' output, each once."""
    lines = [line.strip() for run in runs for line in run.output.splitlines() if "Warning: " in line]
    return tuple(dict.fromkeys(line.partition("Warning: ")[2] for line in lines))
