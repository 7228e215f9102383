"""The audit of a script: its runs, their comparison, and the explanation of the first difference."""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Sequence

from unisono._src.audit.audit_report import AuditedRun, AuditReport, Difference, Divergence, ReplicaComparison
from unisono._src.audit.audit_settings import AuditSettings
from unisono._src.audit.explanation import explain_difference, explain_failure
from unisono._src.audit.record_comparison import RecordDifference, find_difference, measure_divergence
from unisono._src.audit.replica_comparison import compare_replicas
from unisono._src.audit.run_plan import RunPlan, plan_first_runs, plan_placements
from unisono._src.audit.script_run import FinishedRun, ScriptRunner, find_last_lines
from unisono._src.record.run_record import RecordedStep, read_run_record
from unisono._src.versions import list_versions


class AuditError(Exception):
    """An audit that cannot be made: nothing was trained that could be compared."""


def audit_script(settings: AuditSettings, folder: pathlib.Path, say: Callable[[str], None]) -> AuditReport:
    """Run the script on several placements, compare the records, and explain the first difference.

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
        first = self._run(plan_first_runs()[0])
        if first.exit_code != 0 or not first.steps:
            raise AuditError(describe_failure(first))
        difference = self._compare_with_record(first) if self._settings.against else self._compare_placements(first)
        comparison = self._compare_replicas(first) if self._settings.replicas and difference is None else None
        return self._collect(first, difference, comparison)

    def _run(self, plan: RunPlan) -> FinishedRun:
        self._say(plan.name)
        run = self._runner.run_to_end(plan, f"run-{len(self._runs)}")
        self._runs.append(run)
        return run

    def _compare_placements(self, first: FinishedRun) -> Difference | None:
        """Run the script again, then on other placements, until a run differs from the first one."""
        replicas = first.steps[0].program.facts["replicas"]
        settings = self._settings
        placements = plan_placements(first.steps[0].program.placement, replicas, settings.devices, settings.processes)
        for plan in [plan_first_runs()[1], *placements]:
            run = self._run(plan)
            if run.exit_code != 0:
                return explain_failure(self._runner, first, run, self._say)
            process, difference = self._find_difference(first, run)
            if difference is not None:
                return explain_difference(self._runner, first, run, difference, process, self._say)
        return None

    def _find_difference(self, first: FinishedRun, run: FinishedRun) -> tuple[int, RecordDifference | None]:
        """Return (the process, its first difference from the first run): of the process that differs first."""
        differences = [find_difference(first.records[0], record, self._settings.steps) for record in run.records]
        differing = [(process, difference) for process, difference in enumerate(differences) if difference is not None]
        return min(differing, key=lambda pair: pair[1].step, default=(0, None))

    def _compare_with_record(self, first: FinishedRun) -> Difference | None:
        assert self._settings.against is not None
        record = read_run_record(self._settings.against)
        plan = RunPlan(f"recorded in {self._settings.against}")
        recorded = FinishedRun(plan, self._settings.against, None, math.nan, "", (record,))
        self._runs.append(recorded)
        if not recorded.steps:
            raise AuditError(f"The record in {str(self._settings.against)!r} has no steps. Record a run that trains.")
        begin = min(recorded.steps)
        if begin:
            raise AuditError(
                f"The record in {str(self._settings.against)!r} begins with step {begin + 1} of its process, and an audit compares from step 1 "
                f"on. Record the whole program: UNISONO_RECORD=DIRECTORY python script.py."
            )
        theirs = recorded.steps[0].program.facts["replicas"]
        ours = first.steps[0].program.facts["replicas"]
        if theirs != ours:
            raise AuditError(
                f"The recorded run has R = {theirs}, and the script as it is written R = {ours}. Runs with another R are other trainings: "
                f"write replicas={theirs} in the strategy, or start the audit with UNISONO_REPLICAS={theirs}."
            )
        difference = find_difference(record, first.records[0], min(self._settings.steps, len(recorded.steps)))
        return None if difference is None else explain_difference(self._runner, recorded, first, difference, 0, self._say)

    def _compare_replicas(self, first: FinishedRun) -> ReplicaComparison | None:
        """Compare R = 1 with the R of the first run; there is nothing to compare where this is 1."""
        replicas = first.steps[0].program.facts["replicas"]
        if replicas == 1:
            return None
        return compare_replicas(self._runner, replicas, list_warnings(self._runs), self._say)

    def _collect(self, first: FinishedRun, difference: Difference | None, comparison: ReplicaComparison | None) -> AuditReport:
        return AuditReport(
            script=next((word for word in self._settings.program if word != "-m"), ""),
            command=self._settings.program,
            versions={name: str(version) for name, version in list_versions().items()},
            replicas=first.steps[0].program.facts["replicas"],
            runs=tuple(summarize_run(run, self._settings.steps) for run in self._runs),
            equal=difference is None and (comparison is None or comparison.is_near),
            difference=difference,
            divergence=self._list_divergences(first),
            comparison=comparison,
            warnings=list_warnings(self._runs),
        )

    def _list_divergences(self, first: FinishedRun) -> tuple[Divergence, ...]:
        others = [run for run in self._runs if run is not first and run.records]
        return tuple(measure_divergence((first.plan.name, run.plan.name), first.records[0], run.records[0]) for run in others)


def describe_failure(run: FinishedRun) -> str:
    """Return what stopped the first run, or why it cannot be compared."""
    last = find_last_lines(run.output)
    if run.exit_code:
        return f"The script ended with exit code {run.exit_code} as it is written, before anything was compared:\n\n{last}"
    return (
        "The script has trained no step that is recorded. An audit compares steps of `fit`, `train_on_batch` and `strategy.run` of models "
        f"that were made in the scope of a strategy. The run wrote:\n\n{last}"
    )


def summarize_run(run: FinishedRun, most_steps: int) -> AuditedRun:
    """Return what a report says of a run. A call may run more steps than were asked for: these are not compared, and not shown."""
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
    """Return a short digest over all that is recorded of a step."""
    return hashlib.sha256(json.dumps([step.row_digests, step.digests]).encode()).hexdigest()[:16]


def list_warnings(runs: Sequence[FinishedRun]) -> tuple[str, ...]:
    """Return the lines of the runs' output that warn, each once."""
    lines = [line.strip() for run in runs for line in run.output.splitlines() if "Warning: " in line]
    return tuple(dict.fromkeys(line.partition("Warning: ")[2] for line in lines))
