"""Measures the time from the failure of a process to the next finished step, under `unisono launch --restarts`.

python benchmarks/recovery.py [ROUNDS] [--processes N] [--bound SECONDS] [--ray]

A small MLP on N processes of this machine (2), saved every 5 steps. Process 1, or process 0, which is the coordinator too, is killed,
stopped or raises after 12 steps. Prints seconds from there, medians over rounds: until all processes are gone and are started again,
until the new ones have imported and connected, and until the first step that had not been done before is finished.

--ray measures the same on Ray, which must be installed: a worker is killed, or a node comes (recovery_on_ray.py).
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import results

KINDS = ("killed", "raises", "stopped")
STEPS = 20
SAVED_EVERY = 5
FAILS_AFTER = 12
MOMENTS = ("started again", "connected", "next step")


def write_note(directory: Path, what: str, when: float | None = None) -> None:
    with (directory / "notes").open("a") as file:
        file.write(f"{when or time.time()} {what}\n")


def read_notes(directory: Path) -> dict[str, list[float]]:
    """Read when each thing that was noted has happened."""
    at: dict[str, list[float]] = {}
    for line in (directory / "notes").read_text().splitlines():
        when, what = line.split(" ", 1)
        at.setdefault(what, []).append(float(when))
    return at


def train_and_fail(directory: Path, kind: str, process: int) -> None:
    """Train in one of the processes, and fail in the one that is to fail."""
    is_first_start = os.environ["UNISONO_RESTARTS"] == "0"
    if not is_first_start:
        write_note(directory, "started again")
    import unisono as un

    strategy = un.MultiWorkerMirroredStrategy(replicas=8)
    if not is_first_start:
        write_note(directory, "connected")

    import keras
    import numpy as np

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if not is_first_start and batch >= FAILS_AFTER and strategy.writes:
                write_note(directory, "next step")
            if is_first_start and batch + 1 == FAILS_AFTER and strategy.cluster.process == process:
                write_note(directory, "failure")
                if kind == "raises":
                    raise RuntimeError("a failure")
                os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    rows = STEPS * 64
    x = rng.random((rows, 64), dtype="float32")
    y = rng.integers(0, 10, rows)
    backup = un.callbacks.BackupAndRestore(directory / "backup", save_freq=SAVED_EVERY)
    model.fit(x, y, batch_size=64, verbose=0, callbacks=[backup, Fails()])


def measure_recovery(kind: str, process: int, processes: int, bound: float) -> dict[str, float]:
    """Return the seconds from the failure until the last process has come to each of the moments."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = [
            "-m",
            "unisono",
            "launch",
            "--cpu",
            "--processes",
            str(processes),
            "--restarts",
            "1",
            "--bound",
            str(bound),
        ]
        train_it = [str(Path(__file__).resolve()), "--directory", name, "--kind", kind, "--process", str(process)]
        done = subprocess.run([sys.executable, *command, *train_it], capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        at = read_notes(directory)
    return {what: (min(at[what]) if what == "next step" else max(at[what])) - at["failure"][0] for what in MOMENTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=1 if results.SMALL else 2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--bound", type=float, default=30)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.directory:
        train_and_fail(given.directory, given.kind, given.process)
        return
    if given.ray:
        report_ray(given.rounds)
        return
    print(f"{given.processes} processes, bound {given.bound:g} s, medians of {given.rounds} rounds, in seconds from the failure")
    rows = []
    for kind in KINDS[: 1 if results.SMALL else None]:
        for process in (1,) if results.SMALL else (1, 0):
            rounds = [measure_recovery(kind, process, given.processes, given.bound) for _ in range(given.rounds)]
            rows.append({"failure": f"process {process} {kind}"} | take_medians(rounds))
    results.report_rows("recovery", rows)


def report_ray(rounds: int) -> None:
    import recovery_on_ray  # needs Ray

    print(
        f"Ray {recovery_on_ray.ray.__version__}, medians of {rounds} rounds, in seconds from the kill, or from the last step of one worker"
    )
    found = {
        "one of two workers killed": [recovery_on_ray.measure_recovery("killed") for _ in range(rounds)],
        "a node comes to one worker": [recovery_on_ray.measure_recovery("resized") for _ in range(rounds)],
    }
    results.report_rows("recovery on ray", [{"on Ray": what} | take_medians(of) for what, of in found.items()])


def take_medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {f"{what}, s": statistics.median(one[what] for one in rounds) for what in rounds[0]}


if __name__ == "__main__":
    main()
