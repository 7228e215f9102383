"""The replay of a recorded run: the script is started again on what is here, up to one step, and must have the recorded bits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys

from unisono._src.audit.explanation import list_fact_differences
from unisono._src.audit.record_comparison import RecordDifference, compare_steps
from unisono._src.audit.script_run import find_last_lines
from unisono._src.processes import names
from unisono._src.record.run_record import RecordedStep, RunRecord, read_run_record
from unisono._src.record.run_recorder import INSTEAD, STEPS, SWITCH
from unisono._src.replay.replay_report import ReplayReport
from unisono._src.replayed_step import SWITCH as STEP

INSPECTOR = "unisono._src.replay.step_inspector"
RECORD = "record"
REPORT = "step.json"


class ReplayError(Exception):
    """A replay that cannot be made."""


@dataclasses.dataclass(frozen=True)
class ReplaySettings:
    """The options of a replay."""

    program: tuple[str, ...]
    """A script or -m and a module, and its arguments; without arguments it gets those of the recorded run, and an empty program is the recorded
    one."""
    run: pathlib.Path
    """The directory of the record."""
    step: int | None
    """The step, counted from 1; None stands for the first one whose loss is not finite."""
    devices: int = 1
    is_interactive: bool = False


def replay_script(settings: ReplaySettings, folder: pathlib.Path) -> ReplayReport:
    """Run a script again up to a step of its record; return the comparison, and what was seen of the step. `folder` is empty."""
    record = read_run_record(settings.run)
    recorded = record.steps
    step = choose_step(settings, recorded)
    replicas: int = recorded[step].program.facts["replicas"]
    if settings.devices > replicas:
        raise ReplayError(f"The recorded run has R = {replicas}, and --devices is {settings.devices}. Write at most {replicas}.")
    run_script(settings, choose_program(settings.program, record), step, replicas, folder)
    replayed = read_run_record(folder / RECORD).steps
    difference = compare_with_recorded(recorded, replayed, step)
    facts = [] if difference is None else list_other_facts(recorded[step], replayed[max(replayed)])
    seen = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    return ReplayReport(step, min(replayed), replicas, difference, tuple(facts), seen)


def choose_step(settings: ReplaySettings, recorded: dict[int, RecordedStep]) -> int:
    """Return the number of the step that is asked for; refuse one that was not recorded."""
    if settings.step is None:
        found = next((number for number, step in recorded.items() if not math.isfinite(step.loss)), None)
        if found is None:
            raise ReplayError(
                f"All losses that are recorded in {str(settings.run)!r} are finite. Say which step to replay: --step N."
            )
        return found
    if settings.step - 1 not in recorded:
        said = f"steps {min(recorded) + 1} to {max(recorded) + 1}" if recorded else "no steps"
        raise ReplayError(f"The record in {str(settings.run)!r} has {said}, and --step is {settings.step}.")
    return settings.step - 1


def choose_program(program: tuple[str, ...], record: RunRecord) -> tuple[str, ...]:
    """Return the program with its arguments, from the record where they are not given."""
    script, *arguments = record.starts[-1].command
    words = program or (script,)
    is_bare = len(words) == 1 + (words[0] == "-m")
    if words[0] != "-m" and not pathlib.Path(words[0]).exists():
        raise ReplayError(
            f"There is no script {words[0]!r} here. Name the script of the recorded run: unisono replay script.py --run ..."
        )
    return (*words, *arguments) if is_bare else words


def run_script(settings: ReplaySettings, program: tuple[str, ...], step: int, replicas: int, folder: pathlib.Path) -> None:
    """Run the script in a process of its own, which ends after the step."""
    variables = os.environ | {
        names.DEVICES: str(settings.devices),
        "JAX_NUM_CPU_DEVICES": str(settings.devices),
        names.REPLICAS: str(replicas),
        INSTEAD: str(folder / RECORD),
        STEPS: str(step + 1),
        STEP: str(step),
        "UNISONO_INSPECTOR": INSPECTOR,
        "UNISONO_REPLAY_REPORT": str(folder / REPORT),
    }
    variables.pop(SWITCH, None)
    command = [sys.executable, *program]
    if settings.is_interactive:
        code = subprocess.run(command, env=variables | {"UNISONO_REPLAY_INTERACTIVE": "1"}, check=False).returncode
        text = ""
    else:
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        code, text = done.returncode, done.stdout.decode(errors="replace")
    if code or not (folder / REPORT).exists():
        ended = f"ended with exit code {code}" if code else "ended by itself"
        raise ReplayError(f"The script {ended} before step {step + 1} was over:\n\n{find_last_lines(text)}")


def compare_with_recorded(
    recorded: dict[int, RecordedStep], replayed: dict[int, RecordedStep], step: int
) -> RecordDifference | None:
    """Return the first difference of the replayed steps from the recorded ones; None where there is none."""
    for number in range(min(replayed), step + 1):
        before = recorded.get(number - 1)
        again = replayed.get(number - 1) or before
        pair = (before, again) if before and again else None
        difference = compare_steps(recorded[number], replayed[number], pair)
        if difference is not None:
            return difference
    return None


def list_other_facts(recorded: RecordedStep, replayed: RecordedStep) -> list[str]:
    """Return, in words, what the bits depend on and is other in the replay."""
    return list_fact_differences(recorded.program.facts, replayed.program.facts)
