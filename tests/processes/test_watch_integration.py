"""A process that is lost in any way is named by the others, which end within the bound; nothing is left."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from processes import HERE, LAUNCH, are_gone, environment, free_port
from sizes import slow, thorough

pytestmark = pytest.mark.processes

BOUND = 6.0
SLOWNESS = 3
"""So much slower may the machine be."""

LIMIT = 240.0
SCRIPT = str(HERE / "watched.py")


class Launched:
    """A run under `unisono launch`, with the times at which its lines came."""

    def __init__(self, processes: int, *words: object, options: tuple[str, ...] = ()) -> None:
        command = [*LAUNCH, "--processes", str(processes), "--cpu", "--bound", f"{BOUND:g}", *options, SCRIPT, *map(str, words)]
        self.lines: list[str] = []
        self.times: list[float] = []
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    self.lines.append(line.rstrip("\n"))
                    self.times.append(time.monotonic())
                self.code = process.wait(timeout=LIMIT)
            finally:
                process.kill()
        self.text = "\n".join(self.lines)

    def when(self, part: str) -> float:
        return next(at for line, at in zip(self.lines, self.times, strict=True) if part in line)

    def pids(self) -> list[int]:
        return [int(line.split()[-1]) for line in self.lines if "] PID " in line]


HOW = {
    "raise": (1, r"raised KeyError: 'of the victim', after step 10\.", "failed with exit code 1"),
    "exit": (3, r"left its program after step 10, and process \d waits for it\.", "failed with exit code 3"),
    "_exit": (4, r"was killed after step (9|10): it is gone without a word, as by a signal or os\._exit\.", "failed with exit code 4"),
    "SIGKILL": (137, r"was killed after step (9|10): it is gone without a word, as by a signal or os\._exit\.", "was killed by SIGKILL"),
    "SIGTERM": (143, r"was killed after step (9|10): it is gone without a word, as by a signal or os\._exit\.", "was killed by SIGTERM"),
    "SIGSTOP": (
        137, r"is stopped \(SIGSTOP\) after step (9|10): nothing was heard of it for \d+\.\d seconds\.",
        "did not end by itself, and was ended",
    ),
    "stuck": (70, r"is stuck after step 10: it has not moved for \d+\.\d seconds while others wait for it\. ", "failed with exit code 70"),
}  # fmt: skip


FIRST = [(0, "raise"), (1, "stuck")]
"""A process that is killed is tried in a training too, in `promise/test_processes_integration.py`."""
ALL = [*slow(*FIRST), *thorough(*(case for case in itertools.product((0, 1), HOW) if case not in FIRST))]


@pytest.mark.parametrize(("victim", "how"), ALL)
def test_a_lost_process_is_named_and_the_others_end(how, victim):
    code, words, last = HOW[how]
    run = Launched(2, victim, how, 10, 1_000_000)
    other = 1 - victim
    assert run.code == code, run.text
    named = [line for line in run.lines if re.search(rf"^\[{other}\] unisono: process {victim} \(pid \d+ on \S+\) {words}", line)]
    assert len(named) == 1, run.text
    leaving = f"[{other}] unisono: process {other} ends with exit code 76."
    assert leaving in run.lines, run.text
    assert run.when(leaving) - run.when("NOW") < BOUND * SLOWNESS
    assert f"unisono launch: process {victim} {last}." in run.lines, run.text
    if how == "raise":
        assert run.lines[-1] == "KeyError: 'of the victim'"
    if how == "stuck":
        assert f"[{other}]     time.sleep(600)" in run.lines, "its stack"
        assert f"[{victim}] unisono: process {victim} ends with exit code 70." in run.lines, run.text
    assert are_gone(run.pids())


@pytest.mark.slow
@pytest.mark.thorough
def test_all_others_name_the_same_one():
    run = Launched(3, 2, "SIGKILL", 10, 1_000_000)
    assert run.code == 137, run.text
    for other in range(2):
        assert re.search(rf"^\[{other}\] unisono: process 2 .* was killed after step", run.text, re.MULTILINE), run.text
    assert are_gone(run.pids())


@pytest.mark.parametrize("how", [*slow("leave"), *thorough("nothing", "later", "busy")])
def test_what_may_take_its_time_does(how):
    """Steps until the end; a process that goes on for longer than the bound when the others have ended; known long work; a
    program that takes leave of the others itself."""
    run = Launched(2, 0, how, 10, 20)
    assert (run.code, run.lines.count("[0] DONE 19 6.0"), run.lines.count("[1] DONE 19 6.0")) == (0, 1, 1), run.text
    assert "unisono:" not in run.text


@pytest.mark.slow
def test_without_a_launcher():
    """As under Slurm: nobody but the watch ends the others."""
    port, processes = free_port(), []
    for process in range(3):
        described = {"UNISONO_COORDINATOR": f"127.0.0.1:{port}", "UNISONO_PROCESSES": "3", "UNISONO_PROCESS": str(process)}
        env = environment(JAX_PLATFORMS="cpu", UNISONO_BOUND=f"{BOUND:g}", **described)
        command = [sys.executable, SCRIPT, "0", "SIGSTOP", "1", "1000000"]  # early, and the store with it
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    try:
        for process in processes[1:]:
            _, err = process.communicate(timeout=LIMIT)
            assert process.returncode == 76, err
            assert "process 0" in err
            assert "is stopped (SIGSTOP) after step" in err
        os.kill(processes[0].pid, signal.SIGCONT)  # it finds that the others have given it up
        _, err = processes[0].communicate(timeout=LIMIT)
        assert processes[0].returncode == 70, err
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_restart_goes_on_with_those_that_are_left():
    run = Launched(3, 2, "SIGKILL", 10, 200, options=("--restarts", "1", "--min-processes", "1"))
    assert run.code == 0, run.text
    assert "unisono launch: restart 1 of 1, with 2 processes." in run.lines
    assert sorted(line for line in run.lines if "DONE" in line) == ["[0] DONE 199 6.0", "[1] DONE 199 6.0"], run.text
    assert are_gone(run.pids())
