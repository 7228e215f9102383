"""Measures the cost of verification, beside the same fit without it, in turns.

python benchmarks/verification.py [ROUNDS]

Each step is verified, so that the cost shows: where one step in a hundred is, the cost is a hundredth of it, which the last column says as a
share of a step. R is 8 on two devices. Medians over the fits of one process, and the median of the ratios of neighbours.
"""

from __future__ import annotations

import functools
import statistics
import sys
from typing import Any

import keras
import results
from timing import time_in_turns
from workloads import WORKLOADS, Workload

import unisono as un

NAMES = ["W2 CIFAR", "W4 transformer", "W3 MLP, batch 6000"]
SHARE = 0.01


def prepare_fit(workload: Workload, verify: float | None) -> Any:
    """Return a function that fits a model of its own for one epoch."""
    keras.utils.set_random_seed(0)
    with un.MirroredStrategy(devices=2, replicas=8, verify=verify).scope():
        model, optimizer = workload.model(keras)
    model.compile(optimizer, workload.loss(keras), metrics=["accuracy"])
    x, y = workload.data()
    return functools.partial(model.fit, x, y, batch_size=workload.batch, verbose=0)


def main() -> None:
    rounds = 1 if results.SMALL else int(sys.argv[1]) if len(sys.argv) > 1 else 9
    names = NAMES[-1:] if results.SMALL else NAMES
    rows = []
    for name in names:
        workload = WORKLOADS[name]
        times = time_in_turns({"plain": prepare_fit(workload, None), "verified": prepare_fit(workload, 1)}, rounds)
        medians = {f"{kind}, ms": 1e3 * statistics.median(seconds) / workload.steps for kind, seconds in times.items()}
        ratio = statistics.median(verified / plain for verified, plain in zip(times["verified"], times["plain"], strict=True))
        rows.append(
            {"workload": name} | medians | {"verified / plain": ratio, f"cost of verify={SHARE:g}, %": 100 * SHARE * (ratio - 1)}
        )
    results.report_rows("verification", rows)


if __name__ == "__main__":
    main()
