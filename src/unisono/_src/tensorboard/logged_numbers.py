"""Numbers of a training that are logged."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
from numpy.typing import ArrayLike

from unisono._src.keras_private.optimizers import LossScaleOptimizer
from unisono._src.typing import KerasObject, Logs


def flatten_numbers(logs: Logs) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for all numbers of the logs. A metric with several values has a name for each."""
    for name, value in logs.items():
        if isinstance(value, dict):
            yield from flatten_numbers(value)
        elif np.ndim(value):
            yield from ((f"{name}/{index}", float(item)) for index, item in enumerate(np.ravel(value)))
        else:
            yield name, float(value)


def read_logged_settings(optimizer: keras.optimizers.Optimizer | None) -> dict[str, float]:
    """Return an optimizer's current learning rates, by the names that Keras writes, and its loss scale."""
    inner: KerasObject = getattr(optimizer, "inner_optimizer", optimizer)
    settings = {}
    if hasattr(inner, "optimizers"):
        settings = {f"learning_rate_{part.name}": convert_to_float(part.learning_rate) for part in inner.optimizers}
    elif isinstance(inner, keras.optimizers.Optimizer):
        settings = {"learning_rate": convert_to_float(inner.learning_rate)}
    if isinstance(optimizer, LossScaleOptimizer):
        settings["loss_scale"] = convert_to_float(optimizer.dynamic_scale)
    return settings


def convert_to_float(value: keras.Variable | ArrayLike) -> float:
    return float(np.asarray(keras.ops.convert_to_numpy(value)))
