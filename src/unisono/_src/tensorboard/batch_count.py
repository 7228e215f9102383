"""The numbers of batches over all epochs of a fit."""

from __future__ import annotations

from typing import Any


class BatchCount:
    """Counts from 1 on, as Keras' TensorBoard does: what `steps_per_execution` puts into one call is one batch.

    An epoch's numbers go by what came before the epoch. So it does not matter whether a callback that saves the state has its turn
    before or after the batch is counted.
    """

    def __init__(self) -> None:
        self.per_call = 1
        """The model's `steps_per_execution`."""
        self._epoch: int | None = None
        self._before = self._of_epoch = 0

    @property
    def done(self) -> int:
        """How many have ended."""
        return self._before + self._of_epoch

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:  # else a resumed training goes on in it
            self._epoch, self._before, self._of_epoch = epoch, self.done, 0

    def number(self, batch: int) -> int:
        """Of the batch that has this index in the epoch."""
        return self._before + batch // self.per_call + 1

    def ended(self, batch: int) -> bool:
        """Counts it. False where it was counted before: the end of an epoch that nothing is left of after a resume."""
        number = self.number(batch)
        if number <= self.done:
            return False
        self._of_epoch = number - self._before
        return True

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batches_before_epoch": self._before, "batches_of_epoch": self._of_epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._before, self._of_epoch = state["batches_before_epoch"], state["batches_of_epoch"]
