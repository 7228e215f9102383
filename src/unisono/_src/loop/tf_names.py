"""Lines of older programs that mean the same today, and work where something was made in a scope."""

from __future__ import annotations

import functools
import threading
import types
from typing import Any

import jax
import keras
import numpy as np

REDUCTION = types.SimpleNamespace(NONE="none", SUM="sum", AUTO="sum_over_batch_size", SUM_OVER_BATCH_SIZE="sum_over_batch_size")
"""What `keras.losses.Reduction` was."""


def name_metric(metric: keras.metrics.Metric) -> None:
    """`metric.reset_states()` is `metric.reset_state()`, as that is when it is called."""
    object.__setattr__(metric, "reset_states", functools.partial(reset, metric))


def reset(metric: keras.metrics.Metric) -> None:
    metric.reset_state()


class Names:
    """While it is entered, by however many threads: `keras.losses.Reduction` has the names that it had, and `array.numpy()` of a
    JAX array is `np.asarray(array)`. What has such a name anyway keeps it."""

    def __init__(self) -> None:
        self._entered = 0
        self._lock = threading.Lock()
        self._given: list[tuple[Any, str]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._give(keras.losses, "Reduction", REDUCTION)
                self._give(kind_of_arrays(), "numpy", lambda array: np.asarray(array))

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._entered -= 1
            while self._given and not self._entered:
                delattr(*self._given.pop())

    def _give(self, owner: Any, name: str, value: Any) -> None:
        if not hasattr(owner, name):
            setattr(owner, name, value)
            self._given.append((owner, name))


@functools.cache
def kind_of_arrays() -> type:
    """The class of JAX's arrays; asking starts JAX."""
    return type(jax.numpy.zeros(()))


NAMES = Names()
"""Those of this process: of scopes, and of replica code."""
