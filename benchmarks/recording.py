"""Measures the cost of recording digests of each step, beside the same fit without a record, in turns.

python benchmarks/recording.py [ROUNDS]

Prints milliseconds a step, medians over the fits of one process, and the median of the ratios of neighbours. The record is written to a
temporary folder.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
from typing import Any

import keras
import results
from timing import time_in_turns
from workloads import WORKLOADS, Workload

import unisono as un

NAMES = ["W3 MLP, batch 32", "W3 MLP, batch 6000", "W4 transformer", "W2 CIFAR"]


def prepare_recorded_fit(workload: Workload, directory: str | None) -> Any:
    """Return a function that fits a model of its own for one epoch, recorded into the directory if there is one."""
    keras.utils.set_random_seed(0)
    with un.OneDeviceStrategy(replicas=1).scope():
        model, optimizer = workload.model(keras)
    model.compile(optimizer, workload.loss(keras), metrics=["accuracy"])
    x, y = workload.data()
    callbacks = [un.callbacks.Record(directory)] if directory else []
    return functools.partial(model.fit, x, y, batch_size=workload.batch, verbose=0, callbacks=callbacks)


def main() -> None:
    rounds = 1 if results.SMALL else int(sys.argv[1]) if len(sys.argv) > 1 else 15
    names = NAMES[:1] if results.SMALL else NAMES
    rows = []
    for name in names:
        workload = WORKLOADS[name]
        with tempfile.TemporaryDirectory() as directory:
            times = time_in_turns(
                {"plain": prepare_recorded_fit(workload, None), "recorded": prepare_recorded_fit(workload, directory)}, rounds
            )
        medians = {f"{kind}, ms": 1e3 * statistics.median(seconds) / workload.steps for kind, seconds in times.items()}
        ratio = statistics.median(recorded / plain for recorded, plain in zip(times["recorded"], times["plain"], strict=True))
        rows.append({"workload": name} | medians | {"recorded / plain": ratio})
    results.report_rows("recording", rows)


if __name__ == "__main__":
    main()
