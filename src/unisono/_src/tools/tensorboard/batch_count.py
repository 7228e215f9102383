"""Counts of batches over a fit, and the speed of an epoch."""

from __future__ import annotations

import dataclasses
import time

import keras

from unisono._src.keras.private.compiled_losses import get_loss_tracker


@dataclasses.dataclass
class BatchCount:
    """A count of batches from 1 on, over all epochs.

    A checkpoint holds its fields. The numbers of an epoch start from the count before the epoch. So a callback may save the state before or
    after the batch is counted.
    """

    epoch: int | None = None
    batches_before_epoch: int = 0
    batches_of_epoch: int = 0

    @property
    def done(self) -> int:
        """The number of batches that have ended."""
        return self.batches_before_epoch + self.batches_of_epoch

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:  # else a resumed training continues this epoch
            self.batches_before_epoch = self.done
            self.batches_of_epoch = 0
            self.epoch = epoch

    def count_batch(self, number: int) -> bool:
        """Count a batch that has ended. False if it was counted before: after a resume at the very end of an epoch."""
        if number <= self.done:
            return False
        self.batches_of_epoch = number - self.batches_before_epoch
        return True


class Speed:
    """The speed of one epoch, from its beginning on."""

    def __init__(self, steps: int) -> None:
        """`steps` is the number of steps before the epoch."""
        self._steps = steps
        self._began = time.perf_counter()
        self._mark = (0, self._began)
        """The count of batches and the time when the speed was last read."""
        self._first: int | None = None
        self._ended = 0
        """The number of batches of the epoch that have ended, those before a resume included."""
        self.rows_per_second: float | None = None
        """The speed of the training without the validation. None before the training is over, and for models that count no rows."""

    def begin_batch(self, batch: int, number: int) -> None:
        if self._first is None:
            self._first = batch
            self._mark = (number - 1, time.perf_counter())

    def end_batch(self, batch: int) -> None:
        self._ended = batch + 1

    def batches_per_second(self, number: int) -> float:
        """Compute the speed since the last call, or the first batch. The batches must be complete."""
        batches, began = self._mark
        self._mark = (number, time.perf_counter())
        return (number - batches) / (self._mark[1] - began)

    def steps_per_second(self, steps: int) -> float:
        """Compute the speed of the whole epoch, as Keras does. The validation counts too."""
        return (steps - self._steps) / (time.perf_counter() - self._began)

    def note_rows(self, model: keras.Model) -> None:
        """Note the rows of the epoch, from the loss metric. A validation would reset the metric."""
        tracker = get_loss_tracker(model)
        if self.rows_per_second is not None or self._first is None or not self._ended or tracker is None:
            return
        rows = float(tracker.count.value)  # waits for the last step
        if rows:
            fraction = (self._ended - self._first) / self._ended  # the metric also counts the rows before a resume
            self.rows_per_second = rows * fraction / (time.perf_counter() - self._began)
