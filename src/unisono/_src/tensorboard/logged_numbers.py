"""What of a training is logged as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from unisono._src import keras_private


def numbers(logs: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """By their names. Metrics of several values have one name for each."""
    for name, value in logs.items():
        if isinstance(value, dict):
            yield from numbers(value)
        elif np.ndim(value):
            yield from ((f"{name}/{index}", float(item)) for index, item in enumerate(np.ravel(value)))
        else:
            yield name, float(value)


def settings_of(optimizer: Any) -> dict[str, float]:
    """Of an optimizer as it is now: learning rates by the names that Keras writes, and the scale of the loss."""
    inner, found = getattr(optimizer, "inner_optimizer", optimizer), {}
    if hasattr(inner, "optimizers"):
        found = {f"learning_rate_{one.name}": number_in(one.learning_rate) for one in inner.optimizers}
    elif isinstance(inner, keras.optimizers.Optimizer):
        found = {"learning_rate": number_in(inner.learning_rate)}
    if isinstance(optimizer, keras_private.LossScaleOptimizer):
        found["loss_scale"] = number_in(optimizer.dynamic_scale)
    return found


def number_in(value: Any) -> float:
    return float(np.asarray(keras.ops.convert_to_numpy(value)))
