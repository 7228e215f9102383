"""How slow the machine is just now: a fixed piece of work takes so much more CPU time than in a quiet hour.

The same tests take a third more CPU time where others share the cores and their clock. What the piece of work does is what most of a run of
tests does: Python, and tracing and lowering programs. No other thread counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp

QUIET = 0.021
"""CPU seconds of the piece of work beside another worker of a run, where `make test` takes on the same two cores what it takes in a quiet hour.
The two grow together: where tests took two and four times as long as then, it took 42 and 86 ms."""

EVERY = 30
"""Seconds from one measurement to the next: two seconds of CPU time at most in a run of two workers."""

TEXT = "\n".join(f"def f{n}(x, y):\n    return [x + {n}, {{str(z): z * y for z in range(x)}}]" for n in range(150))


def measure() -> float:
    """Return the CPU seconds of the piece of work in this thread."""

    def loss(weights, x):
        for number in range(4):
            x = jnp.tanh(x @ weights + number)
        return x.sum()

    begin = time.thread_time()
    compile(TEXT, "piece of work", "exec")
    shape = jax.ShapeDtypeStruct((8, 8), "float32")
    jax.jit(jax.grad(loss)).lower(shape, shape)
    return time.thread_time() - begin


def compute_factor(measured: Iterable[float]) -> float:
    """Return how many times the CPU time of a quiet hour the piece of work took, by the median; 1 where nothing was measured."""
    return statistics.median([seconds / QUIET for seconds in measured] or [1.0])


class Stopwatch:
    """Measures now and then."""

    def __init__(self):
        self.measured: list[float] = []
        self.next: float | None = None

    def look(self) -> None:
        """Measure, if the last time is long enough ago."""
        if self.next is None:
            measure()  # which is slower the first time in a process
        if self.next is None or time.monotonic() >= self.next:
            self.measured.append(measure())
            self.next = time.monotonic() + EVERY
