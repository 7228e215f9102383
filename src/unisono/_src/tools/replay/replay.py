"""The replay of a recorded run. The script runs again on this machine, up to one step, and must have the recorded bits."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

from unisono._src.processes import names
from unisono._src.tools.audit.script_run import RunPlan, ScriptRunner, find_last_lines
from unisono._src.tools.records import (
    RecordDifference,
    RecordedStep,
    RunRecord,
    compare_steps,
    list_fact_differences,
    read_run_record,
)
from unisono._src.tools.replay.replay_report import ReplayReport

INSPECTOR = "unisono._src.tools.replay.step_inspector"
"""The module that inspects the step, in the script's process."""


class ReplayError(Exception):
    """A replay that is not possible."""


@dataclasses.dataclass(frozen=True)
class ReplaySettings:
    """The options of a replay."""

    program: tuple[str, ...]
    """A script or -m and a module, and its arguments. Without arguments it gets those of the recorded run; an empty program is the recorded
    one."""
    run: pathlib.Path
    """The directory of the record."""
    step: int | None
    """The step, counted from 1. None is the first one whose loss is not finite."""
    devices: int = 1
    is_interactive: bool = False


def replay_script(settings: ReplaySettings, folder: pathlib.Path) -> ReplayReport:
    """Run a script again up to a step of its record.

    The report has the comparison with the record, and what the inspector saw of the step. `folder` is empty.
    """
    record = read_run_record(settings.run)
    recorded = record.steps
    step = choose_step(settings, recorded)
    replicas: int = recorded[step].program.facts["replicas"]
    if settings.devices > replicas:
        raise ReplayError(f"The recorded run has R = {replicas}, and --devices is {settings.devices}. Write at most {replicas}.")
    seen = folder / "step.json"
    variables = {names.REPLAY_STEP: str(step), names.INSPECTOR: INSPECTOR, names.REPLAY_REPORT: str(seen)}
    if settings.is_interactive:
        variables[names.REPLAY_PROMPT] = "1"
    runner = ScriptRunner(choose_program(settings.program, record), step + 1, folder)
    run = runner.run(
        RunPlan("the replay", settings.devices, replicas=replicas),
        "run",
        variables=variables,
        has_terminal=settings.is_interactive,
    )
    if run.exit_code or step not in run.steps or not seen.exists():
        ended = f"ended with exit code {run.exit_code}" if run.exit_code else "ended by itself"
        raise ReplayError(f"The script {ended} before step {step + 1} was over:\n\n{find_last_lines(run.output)}")
    difference = compare_with_recorded(recorded, run.steps)
    facts = [] if difference is None else list_fact_differences(recorded[step].program.facts, run.steps[step].program.facts)
    return ReplayReport(step, min(run.steps), replicas, difference, tuple(facts), json.loads(seen.read_text(encoding="utf-8")))


def choose_step(settings: ReplaySettings, recorded: dict[int, RecordedStep]) -> int:
    """Choose the step to replay. A step that was not recorded is refused."""
    if not recorded:
        raise ReplayError(f"The record in {str(settings.run)!r} has no steps.")
    if settings.step is None:
        told = {number: step.loss for number, step in recorded.items() if step.loss is not None}
        first = next((number for number, loss in told.items() if not math.isfinite(loss)), None)
        if first is None:
            what = "have finite losses" if told else "tell no loss"
            raise ReplayError(f"The steps that are recorded in {str(settings.run)!r} {what}. Say which step to replay: --step N.")
        return first
    if settings.step - 1 not in recorded:
        said = f"steps {min(recorded) + 1} to {max(recorded) + 1}"
        raise ReplayError(f"The record in {str(settings.run)!r} has {said}, and --step is {settings.step}.")
    return settings.step - 1


def choose_program(program: tuple[str, ...], record: RunRecord) -> tuple[str, ...]:
    """Choose the program and its arguments. What is not given comes from the record."""
    script, *arguments = record.starts[-1].command
    words = program or (script,)
    is_bare = len(words) == 1 + (words[0] == "-m")
    if words[0] != "-m" and not pathlib.Path(words[0]).exists():
        raise ReplayError(
            f"There is no script {words[0]!r} here. Name the script of the recorded run: unisono replay script.py --run ..."
        )
    return (*words, *arguments) if is_bare else words


def compare_with_recorded(recorded: dict[int, RecordedStep], replayed: dict[int, RecordedStep]) -> RecordDifference | None:
    """Find the first difference of the replayed steps from the record. None if there is none.

    A record may have only some of the steps, as of one `fit` of several.
    """
    for number in sorted(recorded.keys() & replayed.keys()):
        before = recorded.get(number - 1)
        again = replayed.get(number - 1) or before
        difference = compare_steps(recorded[number], replayed[number], (before, again) if before and again else None)
        if difference is not None:
            return difference
    return None
