"""Lines of older programs that mean the same today, and work where something was made in a scope."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator

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


@contextlib.contextmanager
def reductions() -> Iterator[None]:
    """For the block, `keras.losses.Reduction` has the names that it had."""
    if hasattr(keras.losses, "Reduction"):
        yield
        return
    setattr(keras.losses, "Reduction", REDUCTION)  # noqa: B010
    try:
        yield
    finally:
        delattr(keras.losses, "Reduction")


def name_arrays() -> None:
    """`array.numpy()` is `np.asarray(array)`: what `result()` and `reduce` give are JAX arrays, which do not know it."""
    kind = type(jax.numpy.zeros(()))
    if not hasattr(kind, "numpy"):
        setattr(kind, "numpy", lambda self: np.asarray(self))  # noqa: B010
