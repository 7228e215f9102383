"""`unisono launch` with real processes, which are gone at the end of each test."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
import subprocess
import time

import pytest

from processes import LAUNCH, are_gone, environment
from sizes import slow
from unisono._src.processes.launch.launch import LaunchSettings, PassedSignals, run_processes
from unisono._src.processes.launch.output import Screen
from unisono._src.processes.launch.worker_environment import WorkerDevices

pytestmark = pytest.mark.processes

LIMIT = 120.0


def written(folder: pathlib.Path, source: str) -> str:
    """A script that knows its process as `me`."""
    script = folder / "script.py"
    script.write_text(f"import os, sys, time, signal\nme = int(os.environ['UNISONO_PROCESS'])\n{source}")
    return str(script)


@contextlib.contextmanager
def launched(folder, *words: str, **extra: str):
    process = subprocess.Popen(
        [*LAUNCH, *words], cwd=folder, env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def launch(folder, *words: str, **extra: str) -> tuple[int, list[str], list[str]]:
    with launched(folder, *words, **extra) as process:
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out.splitlines(), err.splitlines()


def numbers(process, lines: int) -> list[int]:
    """What workers print in their first lines, after their prefix."""
    return [int(word) for _ in range(lines) for word in process.stdout.readline().split("] ")[1].split()]


def test_arguments_and_environment(tmp_path):
    script = written(tmp_path, "print(sys.argv, os.environ['UNISONO_PROCESSES'], sys.path[0], __name__)")
    code, out, err = launch(tmp_path, "--processes", "3", "--cpu", script, "--processes", "9", "--", "-m", "--cpu")
    assert (code, err) == (0, [])
    words = [script, "--processes", "9", "--", "-m", "--cpu"]
    assert sorted(out) == [f"[{i}] {words} 3 {tmp_path} __main__" for i in range(3)]


def test_a_worker_that_has_ended_is_not_killed_again(tmp_path, monkeypatch):
    """Another group of processes may have its number by then."""
    killed = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    settings = LaunchSettings((written(tmp_path, ""),), WorkerDevices(None, cpu=True), 5.0)
    ends = run_processes(settings, 2, 0, Screen(io.StringIO(), io.StringIO()), PassedSignals())
    assert [end.status for end in ends] == [0, 0]
    assert len(killed) == len(set(killed)) == 2


def test_a_module(tmp_path):
    script = written(tmp_path, "print(sys.argv, sys.path[0], __name__, __spec__.name)")
    code, out, err = launch(tmp_path, "--processes", "2", "-m", "script", "--cpu")
    assert (code, err) == (0, [])
    assert sorted(out) == [f"[{i}] {[script, '--cpu']} {tmp_path} __main__ script" for i in range(2)]


def test_the_first_failure_has_its_exit_code_and_its_traceback_last(tmp_path):
    source = """
def deep():
    raise ValueError("of process 1")
if me == 1:
    deep()
time.sleep(600)
"""
    script = written(tmp_path, source)
    code, out, err = launch(tmp_path, "--processes", "3", "--bound", "1", script)
    assert (code, out) == (1, [])
    err = [line for line in err if line.removeprefix("[1] ").strip(" ~^")]  # Python 3.13 marks the call below its line
    assert err[-7:] == [
        "unisono launch: process 1 failed with exit code 1.",
        "Traceback (most recent call last):",
        f'  File "{script}", line 7, in <module>',
        "    deep()",
        f'  File "{script}", line 5, in deep',
        '    raise ValueError("of process 1")',
        "ValueError: of process 1",
    ]
    assert [line.removeprefix("[1] ") for line in err[:6]] == err[-6:]


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("sys.exit(3 * me)", 3, "process 1 failed with exit code 3"),
        ("if me == 1: os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1 was killed by SIGKILL"),
        *slow(
            ("sys.exit(75 * me)", 75, None),
            ("if me == 1: sys.exit(75)\ntime.sleep(9)", 75, None),
            ("if me == 1: os.kill(os.getpid(), signal.SIGINT)", 130, "KeyboardInterrupt"),
            ("if me == 1: sys.exit('gone')", 1, "process 1 failed with exit code 1"),
        ),
        ("if me == 0: time.sleep(0.3); sys.exit(3)\nsys.exit(76)", 3, "process 0 failed with exit code 3"),
        ("if me == 0: os.kill(os.getpid(), signal.SIGSTOP)\nsys.exit(76)", 137, "process 0 did not end by itself, and was ended"),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nif me == 0: sys.exit(4)\ntime.sleep(60)", 4, "process 0 failed with exit code 4"),
    ],
)  # fmt: skip
def test_exit_codes(source, code, message, tmp_path):
    bound = "3" if "76" in source else "1"  # that long it waits for the one that the others may mean
    found, _, err = launch(tmp_path, "--processes", "2", "--bound", bound, written(tmp_path, source))
    assert found == code
    assert [line.removeprefix("unisono launch: ").rstrip(".") for line in err[-1:]] == ([] if message is None else [message])


@pytest.mark.slow
def test_one_that_is_alone_and_stopped_is_ended_and_started_again(tmp_path):
    source = "if os.environ['UNISONO_RESTARTS'] == '0': os.kill(os.getpid(), signal.SIGSTOP)\nprint('done')"
    code, out, err = launch(tmp_path, "--processes", "1", "--bound", "1", "--restarts", "1", written(tmp_path, source))
    assert code == 0, err
    assert out == ["[0] done"]
    assert "unisono launch: process 0 was stopped (SIGSTOP), and was ended." in err


@pytest.mark.slow
def test_one_progress_bar_and_both_streams(tmp_path):
    source = r"""
if me == 0:
    import keras
    bar = keras.utils.Progbar(3)
    show = lambda i: bar.update(i)
else:  # as Keras does, without importing it
    show = lambda i: print(f"\r\x1b[1m{i}/3\x1b[0m \x1b[32m----\x1b[0m", end="" if i < 3 else "\n", flush=True)
for i in range(3):
    time.sleep(0.1)
    show(i + 1)
print("done", file=sys.stderr)
"""
    code, out, err = launch(tmp_path, "--processes", "2", written(tmp_path, source))
    assert code == 0
    assert len(out) == 1
    assert out[0].startswith("[0] ")
    assert "3/3" in out[0]
    assert sorted(err) == ["[0] done", "[1] done"]


WAITING = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def leave(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number != signal.SIGUSR1:
        sys.exit(75)
for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
    signal.signal(signal.Signals[name], leave)
print(os.getpid(), child.pid, flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("name", ["SIGINT", *slow("SIGTERM", "SIGHUP")])
def test_signals_are_passed_on_and_nothing_is_left(name, tmp_path):
    with launched(tmp_path, "--processes", "2", "--restarts", "3", written(tmp_path, "# BackupAndRestore" + WAITING)) as process:
        pids = numbers(process, 2)
        process.send_signal(signal.SIGUSR1)
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] SIGUSR1\n", "[1] SIGUSR1\n"]
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=LIMIT)
        assert sorted(out.splitlines()) == [f"[0] {name}", f"[1] {name}"]
        assert (process.returncode, err) == (75, "")
        assert are_gone(pids)


def test_no_worker_outlives_the_launcher_that_is_killed(tmp_path):
    with launched(tmp_path, "--processes", "2", written(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(600)")) as process:
        pids = numbers(process, 2)
        process.kill()
        assert are_gone(pids)


@pytest.mark.slow
def test_who_asks_three_times_does_not_wait_for_a_worker_that_hears_nothing(tmp_path):
    source = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    with launched(tmp_path, "--processes", "2", written(tmp_path, source)) as process:
        pids = numbers(process, 2)
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        process.communicate(timeout=LIMIT)
        assert process.returncode == 137
        assert are_gone(pids)


def test_restarts_with_all_processes(tmp_path):
    source = """
count = os.environ["UNISONO_RESTARTS"]
print(count, os.environ["UNISONO_PROCESSES"])
if me == 1 and count != "2":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = written(tmp_path, source)
    code, out, err = launch(tmp_path, "--processes", "2", "--restarts", "3", "--bound", "1", script)
    assert code == 0
    assert sorted(set(out)) == ["[0] 0 2", "[0] 1 2", "[0] 2 2", "[1] 0 2", "[1] 1 2", "[1] 2 2"]
    assert err == [
        f"unisono launch: {script} seems to save nothing, so that a restart would begin from the start. Add to the callbacks of fit:",
        "",
        '    un.callbacks.BackupAndRestore("backup", save_freq=100)',
        "",
        "unisono launch: process 1 was killed by SIGKILL.",
        "unisono launch: restart 1 of 3, with 2 processes.",
        "unisono launch: process 1 was killed by SIGKILL.",
        "unisono launch: restart 2 of 3, with 2 processes.",
    ]


def test_restarts_with_the_processes_that_are_left(tmp_path):
    source = """
# BackupAndRestore
of = int(os.environ["UNISONO_PROCESSES"])
print(of)
if me == of - 1:
    sys.exit(5)
sys.exit(76)
"""
    code, out, err = launch(
        tmp_path, "--processes", "3", "--restarts", "3", "--min-processes", "2", "--bound", "20", written(tmp_path, source)
    )
    assert code == 5
    assert sorted(out) == sorted(["[0] 3", "[1] 3", "[2] 3", *["[0] 2", "[1] 2"] * 3])
    assert err[-2:] == ["unisono launch: restart 3 of 3, with 2 processes.", "unisono launch: process 1 failed with exit code 5."]


def test_a_program_that_was_asked_to_leave_is_not_started_again(tmp_path):
    code, out, err = launch(
        tmp_path, "--processes", "2", "--restarts", "3", written(tmp_path, "# BackupAndRestore\nprint(1)\nsys.exit(75)")
    )
    assert (code, sorted(out), err) == (75, ["[0] 1", "[1] 1"], [])


def test_the_port_is_free_and_on_loopback(tmp_path):
    source = """
import socket
if me == 0:
    host, port = os.environ["UNISONO_COORDINATOR"].split(":")
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does
        listening.bind((host, int(port)))
        listening.listen()
    print(host)
"""
    assert launch(tmp_path, "--processes", "2", written(tmp_path, source)) == (0, ["[0] 127.0.0.1"], [])
