"""Runs of a script in fresh processes. Each run has a record of its steps."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping

from unisono._src.keras.record import run_details
from unisono._src.keras.record.run_recorder import EACH_PROCESS, INSTEAD, STEPS
from unisono._src.processes import names
from unisono._src.tools.records import RecordedStep, RunRecord, read_run_record

LAST_LINES = 25

KILLED = 124
"""The exit code of a run that was killed at its limit, as `timeout` has it."""

NO_VARIABLES: Mapping[str, str] = {}


class LimitError(Exception):
    """A run that was killed at its limit. It may only be slow, so it does not show a difference."""


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A placement to run a script on."""

    name: str
    devices: int | None = None
    """Devices of each process; None leaves the placement to the script."""
    processes: int = 1
    replicas: int | None = None
    """R; None leaves it to the script."""
    hash_seed: int = 0
    """PYTHONHASHSEED, which decides the order of sets and the values of `hash` of strings."""


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run that is over."""

    plan: RunPlan
    directory: pathlib.Path
    exit_code: int | None
    seconds: float
    output: str
    records: tuple[RunRecord, ...]
    """The records, by process. There are none if the run has recorded no step."""
    is_killed: bool = False
    """Whether it was killed at its limit."""

    @property
    def steps(self) -> dict[int, RecordedStep]:
        """The steps of process 0."""
        return self.records[0].steps if self.records else {}

    @property
    def has_details(self) -> bool:
        return bool(self.records and self.records[0].details)


@dataclasses.dataclass(frozen=True)
class ScriptRunner:
    """Runs one script, with its arguments."""

    program: tuple[str, ...]
    """A script or -m and a module, and its arguments."""
    steps: int
    """The process ends after this number of steps."""
    folder: pathlib.Path
    """For records, a directory for each run."""
    limit: float | None = None
    """Seconds after which a run is killed; None for no limit."""

    def run(
        self,
        plan: RunPlan,
        label: str,
        variables: Mapping[str, str] = NO_VARIABLES,
        has_terminal: bool = False,
    ) -> FinishedRun:
        """Run the script on a placement.

        Args:
            plan: The placement.
            label: The name of the directory of the record.
            variables: More of the environment.
            has_terminal: Whether the script reads and writes what this process does, in place of a file.
        """
        directory = self.folder / label
        directory.mkdir()
        command = [*list_launcher_words(plan), *self.program]
        environment = {**make_variables(os.environ, plan, directory, self.steps), **variables}
        begin = time.monotonic()
        with (directory / "output").open("w+b") as output:
            is_killed = False
            try:
                code = subprocess.run(
                    command,
                    env=environment,
                    stdin=None if has_terminal else subprocess.DEVNULL,
                    stdout=None if has_terminal else output,
                    stderr=None if has_terminal else output,
                    timeout=self.limit,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = KILLED
                is_killed = True
            seconds = time.monotonic() - begin
            output.seek(0)
            text = output.read().decode(errors="replace")
        return FinishedRun(plan, directory, code, seconds, text, read_records(directory), is_killed)

    def run_to_end(self, plan: RunPlan, label: str) -> FinishedRun:
        """Run the script on a placement, with details in its record. `LimitError` is raised if it is killed."""
        run = self.run(plan, label, variables={run_details.SWITCH: "1"})
        if run.is_killed:
            last = find_last_lines(run.output) or "nothing"
            raise LimitError(
                f"{plan.name}: the script was killed after {self.limit:g} seconds, the limit, in its step {len(run.steps) + 1}. Write --limit with "
                f"more seconds, or --steps with fewer steps. The run wrote:\n\n{last}"
            )
        return run


def list_launcher_words(plan: RunPlan) -> list[str]:
    """Build the command that starts Python. It starts one process or several."""
    if plan.processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "unisono", "launch", "--processes", str(plan.processes)]


def make_variables(environment: Mapping[str, str], plan: RunPlan, directory: pathlib.Path, steps: int) -> dict[str, str]:
    """Build the environment of a run."""
    ours = {
        INSTEAD: str(directory),
        EACH_PROCESS: "1",
        STEPS: str(steps),
        names.OTHER_PROGRAMS: "1",
        "PYTHONHASHSEED": str(plan.hash_seed),
    }
    if plan.devices is not None:
        ours |= {names.DEVICES: str(plan.devices), "JAX_NUM_CPU_DEVICES": str(plan.devices)}
    if plan.replicas is not None:
        ours[names.REPLICAS] = str(plan.replicas)
    return {**environment, **ours}


def read_records(directory: pathlib.Path) -> tuple[RunRecord, ...]:
    """Read the records of a run's processes, in order. There are none if process 0 has recorded no step."""
    if not (directory / "process-0").exists():
        return ()
    folders = sorted(directory.glob("process-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return tuple(read_run_record(folder) for folder in folders)


def find_last_lines(output: str) -> str:
    """Cut the last lines from a run's output."""
    return "\n".join(output.rstrip().splitlines()[-LAST_LINES:])
