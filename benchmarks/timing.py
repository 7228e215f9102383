"""What every contender prints: seconds a step, one number for each epoch after the warm-up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from workloads import Workload

WARM_UP = 2
"""Epochs that do not count: the first compiles."""


def report(workload: Workload, epoch: Callable[[int], object]) -> None:
    """`epoch(number)` trains for one, and returns when its last step is done."""
    times: list[float] = []
    for number in range(WARM_UP + workload.epochs):
        start = time.perf_counter()
        epoch(number)
        times.append((time.perf_counter() - start) / workload.steps)
    print(json.dumps(times[WARM_UP:]), flush=True)
