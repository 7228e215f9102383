"""The data position of one call of `fit`.

A call can resume at the position where an earlier one stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import keras

from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.keras.data.resume_point import ResumePoint, SourceProgress
from unisono._src.keras.data.row_order import RowOrder
from unisono._src.keras.fit.call_arguments import FitCallback, has_keeper
from unisono._src.keras.private.epoch_steps import EpochSteps
from unisono._src.typing import Json, Logs


class DataPosition:
    """The data position of one call of fit. It is made when fit has its source of data; callbacks find it at the model's bond."""

    def __init__(self, epochs: EpochSteps, callbacks: list[keras.callbacks.Callback]) -> None:
        self.epochs = epochs
        self._bounds = [callback.steps_until_due for callback in callbacks if isinstance(callback, FitCallback)]
        """Functions of callbacks: the most steps that a call may take from the next step on, so that the callback acts in time."""
        self.order: RowOrder = epochs.adapter.order
        self.progress = SourceProgress(self.order.passes)
        self.logs: Logs = {}
        """The logs of the last step."""
        if not has_keeper(callbacks):
            return
        epochs.adapter.warn_before_resumes()
        if not epochs.adapter.has_index:
            self.progress.digest_all()
        elif epochs.adapter.changes_with_epochs and not epochs.are_passes:
            warn_of_changing_rows(epochs)

    def note_trained(self, batches: list[GlobalBatch], logs: Logs) -> None:
        """Note the batches of a step, and the last one's logs."""
        self.logs = logs
        for batch in batches if self.progress.digests_all else batches[-1:]:
            if batch.position is not None:
                self.progress.note_trained(batch, batch.position, self.epochs.adapter.size)
                self.order.note_pass(batch.position[0])

    def repeat_logs(self) -> Logs:
        """Repeat the logs of the last step, in place of a step. An earlier call of fit stopped at the end of this epoch."""
        if self.progress.position is not None:
            self.order.note_pass(self.progress.position[0])
        return self.logs

    def most_steps(self, step: int) -> int | None:
        """The most steps that one call may take from this one on. None where no callback limits them."""
        return min((bound(step) for bound in self._bounds), default=None)

    def get_state(self, end_of_epoch: bool) -> dict[str, Json]:
        """The data position in JSON."""
        place = self.progress.place
        if place is not None and end_of_epoch and self.epochs.is_pass_over(place.position[1]):
            place = place._replace(position=(place.position[0] + 1, 0))
        return {"seeds": self.epochs.adapter.seeds, "place": None if place is None else place._asdict()}

    def resume_at(self, state: dict[str, Json], step: int, logs: Logs, before_step: Callable[[], None] | None) -> None:
        """Begin the next epoch with this step, at this state's position.

        `before_step` is called when callbacks know that the epoch begins, and before they know of the step.
        """
        adapter = self.epochs.adapter
        adapter.seeds = state["seeds"]
        if state["place"] is None:
            return
        place = ResumePoint.from_json(state["place"])
        items, digest = adapter.from_place(place)
        self.progress = SourceProgress.restore(place, digest)
        self.epochs.begin_at_step(step, (batch for _, _, batch in items), place.position[1], before_step)
        self.logs = logs


def warn_of_changing_rows(epochs: EpochSteps) -> None:
    """Warn of a dataset that changes in the middle of a pass. The number of passes does not tell its state."""
    warnings.warn(
        f"The dataset has an on_epoch_begin or on_epoch_end of its own, which Keras calls for each epoch, and an epoch has {epochs.steps} steps, "
        f"which is no pass over the {epochs.adapter.num_batches} batches of the dataset. A training that is resumed may read other rows. Leave "
        f"out steps_per_epoch, or make the rows of a batch depend on its number alone.",
        stacklevel=2,
    )
