"""How fast an epoch is trained."""

from __future__ import annotations

import time
from typing import Any

from unisono._src import keras_private


class Speed:
    """Of one epoch, from its beginning on."""

    def __init__(self, steps: int) -> None:
        """`steps` were taken before it."""
        self._steps = steps
        self._began = time.perf_counter()
        self._first: int | None = None
        self._last: int | None = None
        self._since: tuple[int, float] | None = None
        self.rows_per_second: float | None = None
        """Of its training, without its validation; None before that is over, and for models that count no rows."""

    def batch_begins(self, batch: int, number: int) -> None:
        if self._first is None:
            self._first, self._since = batch, (number - 1, time.perf_counter())

    def batch_ended(self, batch: int) -> None:
        self._last = batch

    def batches_per_second(self, number: int) -> float:
        """Since it was last asked, or since the epoch's first batch. The batches must have been waited for."""
        before, now = self._since or (0, self._began), time.perf_counter()
        self._since = number, now
        return (number - before[0]) / (now - before[1])

    def steps_per_second(self, steps: int) -> float:
        """Of the whole epoch, its validation included, as Keras counts."""
        return (steps - self._steps) / (time.perf_counter() - self._began)

    def training_ended(self, model: Any) -> None:
        """Before a validation resets the metrics: the loss' has counted the rows."""
        tracker = keras_private.loss_tracker(model)
        if self.rows_per_second is not None or self._first is None or self._last is None or tracker is None:
            return
        rows = float(tracker.count.value)  # waits for the last step
        if rows:
            batches = self._last + 1
            here = (batches - self._first) / batches  # the metric knows those from before a resume too
            self.rows_per_second = rows * here / (time.perf_counter() - self._began)
