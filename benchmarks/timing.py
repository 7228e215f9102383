"""How things are timed: epochs of one contender, whose seconds a step it prints, and calls of one process in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from workloads import Workload

WARM_UP = 2
"""Epochs, or rounds, that do not count: the first compiles."""


def report(workload: Workload, epoch: Callable[[int], object]) -> None:
    """`epoch(number)` trains for one, and returns when its last step is done."""
    times: list[float] = []
    for number in range(WARM_UP + workload.epochs):
        start = time.perf_counter()
        epoch(number)
        times.append((time.perf_counter() - start) / workload.steps)
    print(json.dumps(times[WARM_UP:]), flush=True)


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds that each call took, in so many rounds after the warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARM_UP + rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return times
