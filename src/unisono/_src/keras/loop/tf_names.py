"""Names of older Keras and TensorFlow programs that mean the same.

They are for code in a scope and for replica code.
"""

from __future__ import annotations

import functools
import operator
import threading
import types

import jax
import keras
import numpy as np

REDUCTION = types.SimpleNamespace(NONE="none", SUM="sum", AUTO="sum_over_batch_size", SUM_OVER_BATCH_SIZE="sum_over_batch_size")
"""The names that `keras.losses.Reduction` had."""


def add_reset_states(metric: keras.metrics.Metric) -> None:
    """Give the metric `reset_states()`. It calls the `reset_state()` that the metric has at that time."""
    object.__setattr__(metric, "reset_states", functools.partial(operator.methodcaller("reset_state"), metric))


class TensorFlowNames:
    """A context with old names, for any number of threads.

    Inside it `keras.losses.Reduction` has its old names, and `array.numpy()` of a JAX array is `np.asarray(array)`. A name that
    exists without it stays as it is. When the last thread leaves, the names are gone.
    """

    def __init__(self) -> None:
        self._entered = 0
        self._lock = threading.Lock()
        self._added: list[tuple[object, str]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._add_name(keras.losses, "Reduction", REDUCTION)
                self._add_name(find_array_class(), "numpy", lambda array: np.asarray(array))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            while self._added and not self._entered:
                delattr(*self._added.pop())

    def _add_name(self, owner: object, name: str, value: object) -> None:
        if not hasattr(owner, name):
            setattr(owner, name, value)
            self._added.append((owner, name))


@functools.cache
def find_array_class() -> type:
    """Find the class of JAX's arrays outside of traces.

    Inside of a trace most arrays are of another class. The first call starts JAX.
    """
    with jax.ensure_compile_time_eval():
        return type(jax.numpy.zeros(()))


NAMES = TensorFlowNames()
"""The names of this process: scopes and replica code enter them."""
