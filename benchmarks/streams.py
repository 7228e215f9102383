"""Measures how long the processes of a training take to read a source whose rows have to be made, without training on them.

python benchmarks/streams.py [ROUNDS]

Each row takes 2 ms, of the processor or asleep, as where a disk or a server is waited for. Prints seconds of a first pass in 1, 2 and 4 processes
of this machine, medians over rounds, until the last process has all batches. With more
processes than cores, look at rows that are made asleep.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
import numpy as np
import results

BATCHES = 4 if results.SMALL else 24
ROWS = 8 if results.SMALL else 32
SECONDS = 2e-3
PROCESSES = (1, 2) if results.SMALL else (1, 2, 4)
SOURCES = ("PyDataset", "generator")
WORK = ("asleep",) if results.SMALL else ("busy", "asleep")
Batch = tuple[np.ndarray, np.ndarray]


class Decoded(keras.utils.PyDataset):
    """Images, each of which takes its time."""

    def __init__(self, work: str) -> None:
        super().__init__()
        self.work = work

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Batch:
        if self.work == "asleep":
            time.sleep(SECONDS * ROWS)
        else:
            end = time.thread_time() + SECONDS * ROWS
            while time.thread_time() < end:
                pass
        return np.full((ROWS, 64, 64, 3), index, "uint8"), np.zeros(ROWS, "int32")

    def generate(self) -> Iterator[Batch]:
        return (self[index] for index in range(BATCHES))


def read_source(source: str, work: str) -> float:
    """Read a source in one of the processes, and return the seconds."""
    strategy = un.MultiWorkerMirroredStrategy(replicas=max(PROCESSES))
    decoded = Decoded(work)
    warm, dataset = map(
        strategy.distribute_dataset, ([next(decoded.generate())], decoded if source == "PyDataset" else decoded.generate())
    )
    list(warm)
    strategy.reduce("SUM", strategy.run(lambda batch: batch[1].sum(), args=(next(iter(warm)),)))  # all have come here
    start = time.perf_counter()
    assert sum(1 for _ in dataset) == BATCHES
    return time.perf_counter() - start


def measure_reading(source: str, work: str, processes: int) -> float:
    """Return the seconds of the slowest process."""
    launch = ["-m", "unisono", "launch", "--cpu", "--processes", str(processes), "--devices-per-process", "1"]
    one = [str(Path(__file__).resolve()), source, work]
    done = subprocess.run([sys.executable, *launch, *one], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return max(float(seconds) for seconds in re.findall(r"READ (\S+)", done.stdout))


def main() -> None:
    if "UNISONO_PROCESS" in os.environ:
        print("READ", read_source(*sys.argv[1:]))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1 if results.SMALL else 3
    rows: list[dict[str, Any]] = []
    for source in SOURCES:
        for work in WORK:
            seconds = {
                count: statistics.median(measure_reading(source, work, count) for _ in range(rounds)) for count in PROCESSES
            }
            named = {f"{count} processes, s" if count > 1 else "1 process, s": value for count, value in seconds.items()}
            most = max(PROCESSES)
            rows.append({"source": source, "rows are made": work} | named | {f"{most} to 1": seconds[most] / seconds[1]})
    results.report_rows("streams", rows)


if __name__ == "__main__":
    main()
