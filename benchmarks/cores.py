"""Waits for the full speed of the cores: those of a virtual machine may be two threads of one core, for seconds or minutes.

What is timed meanwhile takes up to 1.8 times as long, and products more so than anything else. So timings wait for cores that compute
beside one another as fast as one alone, and not longer than `PATIENCE`.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
from results import SMALL

PATIENCE = 0.0 if SMALL else 20.0
"""Seconds that the timings of a process may wait altogether."""
SHARED = 1.2
"""Cores are shared where products on all of them take so many times as long as on one."""
SIDE = 256
PRODUCTS = 10


def time_products() -> float:
    """Return the seconds that some products take on one core."""
    a = np.ones((SIDE, SIDE), "float32")
    start = time.perf_counter()
    for _ in range(PRODUCTS):
        a @ a
    return time.perf_counter() - start


def measure_slowdown() -> float:
    """Return how many times as long a product takes on all cores at once as on one."""
    alone = min(time_products() for _ in range(3))
    beside: list[float] = []
    threads = [
        threading.Thread(target=lambda: beside.extend(time_products() for _ in range(5))) for _ in range(os.cpu_count() or 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.median(beside) / alone


def make_ready_check() -> Callable[[], bool]:
    """Return a function that says whether to time now: the cores are free, or this process has waited for long enough.

    NumPy must multiply with one thread, or the products say nothing.
    """
    end = time.monotonic() + PATIENCE
    is_known = os.environ.get("OPENBLAS_NUM_THREADS") == "1"
    return lambda: not is_known or time.monotonic() > end or measure_slowdown() < SHARED
