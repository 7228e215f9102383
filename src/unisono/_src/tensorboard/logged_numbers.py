"""Numbers of a training that are logged."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
from numpy.typing import ArrayLike

from unisono._src import keras_private
from unisono._src.typing import KerasObject, Logs


def numbers(logs: Logs) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for all numbers of the logs. A metric with several values has a name for each."""
    for name, value in logs.items():
        if isinstance(value, dict):
            yield from numbers(value)
        elif np.ndim(value):
            yield from ((f"{name}/{index}", float(item)) for index, item in enumerate(np.ravel(value)))
        else:
            yield name, float(value)


def settings_of(optimizer: keras.optimizers.Optimizer | None) -> dict[str, float]:
    """Return an optimizer's current learning rates, by the names that Keras writes, and its loss scale."""
    inner: KerasObject = getattr(optimizer, "inner_optimizer", optimizer)
    settings = {}
    if hasattr(inner, "optimizers"):
        settings = {f"learning_rate_{part.name}": number_in(part.learning_rate) for part in inner.optimizers}
    elif isinstance(inner, keras.optimizers.Optimizer):
        settings = {"learning_rate": number_in(inner.learning_rate)}
    if isinstance(optimizer, keras_private.LossScaleOptimizer):
        settings["loss_scale"] = number_in(optimizer.dynamic_scale)
    return settings


def number_in(value: keras.Variable | ArrayLike) -> float:
    return float(np.asarray(keras.ops.convert_to_numpy(value)))
