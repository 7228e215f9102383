"""The speed of the training of an epoch."""

from __future__ import annotations

import time

import keras

from unisono._src.keras_private.compiled_losses import get_loss_tracker


class Speed:
    """The speed of one epoch, from its beginning on."""

    def __init__(self, steps: int) -> None:
        """`steps` is the number of steps before the epoch."""
        self._steps = steps
        self._began = time.perf_counter()
        self._first: int | None = None
        self._last: int | None = None
        self._last_mark: tuple[int, float] | None = None
        """The batches and the time when the speed was last asked for."""
        self.rows_per_second: float | None = None
        """The speed of the training without the validation. None before the training is over, and for models that count no rows."""

    def begin_batch(self, batch: int, number: int) -> None:
        if self._first is None:
            self._first = batch
            self._last_mark = (number - 1, time.perf_counter())

    def end_batch(self, batch: int) -> None:
        self._last = batch

    def batches_per_second(self, number: int) -> float:
        """Return the speed since the last call, or since the epoch's first batch. The batches must be complete."""
        before = self._last_mark or (0, self._began)
        now = time.perf_counter()
        self._last_mark = number, now
        return (number - before[0]) / (now - before[1])

    def steps_per_second(self, steps: int) -> float:
        """Return the speed of the whole epoch, validation included, as Keras counts."""
        return (steps - self._steps) / (time.perf_counter() - self._began)

    def note_rows(self, model: keras.Model) -> None:
        """Note the rows of the epoch from the loss metric, before a validation resets it."""
        tracker = get_loss_tracker(model)
        if self.rows_per_second is not None or self._first is None or self._last is None or tracker is None:
            return
        rows = float(tracker.count.value)  # waits for the last step
        if rows:
            batches = self._last + 1
            fraction = (batches - self._first) / batches  # the metric also counts the rows before a resume
            self.rows_per_second = rows * fraction / (time.perf_counter() - self._began)
