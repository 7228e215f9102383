"""The numbers of batches over all epochs of a fit."""

from __future__ import annotations

from typing import TypedDict


class BatchCountState(TypedDict):
    """The state of a `BatchCount`, in JSON."""

    epoch: int | None
    batches_before_epoch: int
    batches_of_epoch: int


class BatchCount:
    """A count of batches from 1 on, as Keras' TensorBoard counts: the `steps_per_execution` batches of one call are one batch.

    The numbers of an epoch start from the count before the epoch. So a callback may save the state before or after the batch is counted.
    """

    def __init__(self) -> None:
        self.steps_per_execution = 1
        """The model's `steps_per_execution`."""
        self._epoch: int | None = None
        self._batches_before = self._batches_of_epoch = 0

    @property
    def done(self) -> int:
        """Return how many batches have ended."""
        return self._batches_before + self._batches_of_epoch

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:  # else a resumed training continues this epoch
            done = self.done
            self._epoch = epoch
            self._batches_before = done
            self._batches_of_epoch = 0

    def number(self, batch: int) -> int:
        """Return the number of the batch with this index in the epoch."""
        return self._batches_before + batch // self.steps_per_execution + 1

    def ended(self, batch: int) -> bool:
        """Count a batch that has ended. Return False if it was counted before: after a resume at the very end of an epoch."""
        number = self.number(batch)
        if number <= self.done:
            return False
        self._batches_of_epoch = number - self._batches_before
        return True

    def get_state(self) -> BatchCountState:
        return {
            "epoch": self._epoch,
            "batches_before_epoch": self._batches_before,
            "batches_of_epoch": self._batches_of_epoch,
        }

    def set_state(self, state: BatchCountState) -> None:
        self._epoch = state["epoch"]
        self._batches_before = state["batches_before_epoch"]
        self._batches_of_epoch = state["batches_of_epoch"]
