"""Times epochs of one contender, whose seconds a step it prints, and calls of one process in turns."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping

import cores
from workloads import Workload

WARM_UP = 2
"""Epochs, or rounds, that do not count: the first compiles."""

EPOCHS = "UNISONO_BENCHMARKS_EPOCHS"
"""The environment variable that says how many epochs are timed, where these are not the workload's."""


Ready = Callable[[], bool]
"""A function that says whether the cores have their full speed (`cores.make_ready_check`)."""


def time_call(call: Callable[[], object], is_ready: Ready) -> float:
    """Return the seconds that a call took which began and ended while the cores had their full speed."""
    while True:
        while not is_ready():
            time.sleep(0.1)
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        if is_ready():
            return took


def report_epochs(workload: Workload, epoch: Callable[[int], object], is_ready: Ready | None = None) -> None:
    """Print the seconds a step of each epoch. `epoch(number)` trains for one, and returns when its last step is done."""
    for number in range(WARM_UP):
        epoch(number)
    is_ready = is_ready or cores.make_ready_check()
    numbers = range(WARM_UP, WARM_UP + int(os.environ.get(EPOCHS, workload.epochs)))
    times = [time_call(functools.partial(epoch, number), is_ready) / workload.steps for number in numbers]
    print(json.dumps(times), flush=True)


LEAST = 0.05
"""Seconds that a call of an operation is repeated for, when its time is taken."""


def measure_seconds(call: Callable[[], object], tries: int = 15) -> float:
    """Return the seconds that a short call takes: the least of some times of several calls."""
    for _ in range(WARM_UP):
        call()
    is_ready = cores.make_ready_check()
    count = max(1, round(LEAST / time_call(call, is_ready)))
    return min(time_call(lambda: [call() for _ in range(count)], is_ready) / count for _ in range(tries))


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, is_ready: Ready | None = None
) -> dict[str, list[float]]:
    """Return the seconds that each call took, by name: one number for each round after the warm-up."""
    for call in list(calls.values()) * WARM_UP:
        call()
    is_ready = is_ready or cores.make_ready_check()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(time_call(call, is_ready))
    return times
