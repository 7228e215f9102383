"""Metrics as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops


class Keeps(keras.metrics.Metric):
    """Keeps one number: `update(old, y_true, y_pred)`."""

    def __init__(self, update: Callable[[Any, Any, Any], Any], name: str, dtype: str = "float32") -> None:
        super().__init__(name=name)
        self.update = update
        self.value = self.add_variable((), "zeros", dtype=dtype, name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(self.update(self.value, y_true, y_pred))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.value)
