"""Watch the labels of each batch, and for a loss that is not finite."""

from __future__ import annotations

import collections
import time
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.state import get_step_count
from unisono._src.keras.record.run_recorder import is_recording
from unisono._src.keras.steps.loss_inputs import LabelRange
from unisono._src.typed_jax import is_ready
from unisono._src.typing import Array, Logs


def check_labels(ranges: Iterable[LabelRange], batch: GlobalBatch) -> None:
    """Refuse labels that are no class of the model's output.

    Labels that are ignored, or have the weight 0, may have any value.
    """
    for given in ranges:
        labels = batch.leaves[given.labels].array
        if not are_in_range(labels, given.classes):
            weights = None if given.weights is None else batch.leaves[given.weights].array
            wrong = find_wrong_labels(labels, given, weights)
            if wrong.any():
                refuse_label(batch, given, tuple(np.argwhere(wrong)[0]), int(wrong.sum()))


def are_in_range(labels: np.ndarray, classes: int) -> bool:
    """Whether all labels are from 0 to classes - 1. One pass is enough: as unsigned numbers, negative ones are the largest.

    >>> are_in_range(np.array([0, 2]), 3), are_in_range(np.array([0, 3]), 3), are_in_range(np.array([-1]), 3)
    (True, False, False)
    """
    unsigned = labels.view(labels.dtype.str.replace("i", "u"))
    return not labels.size or int(unsigned.max()) < classes


def find_wrong_labels(labels: np.ndarray, given: LabelRange, weights: np.ndarray | None) -> np.ndarray:
    """Find where labels that count are out of range."""
    wrong = (labels < 0) | (labels >= given.classes)
    if given.ignored is not None:
        wrong &= labels != given.ignored
    if weights is not None:
        while weights.ndim > labels.ndim and weights.shape[-1] == 1:
            weights = weights[..., 0]
        counted = weights.reshape(weights.shape + (1,) * (labels.ndim - weights.ndim)) != 0
        wrong &= counted
    return wrong


def refuse_label(batch: GlobalBatch, given: LabelRange, index: tuple[int, ...], count: int) -> None:
    """Raise the error about a batch's first wrong label."""
    leaf = batch.leaves[given.labels]
    label = int(leaf.array[index])
    row = int(index[0])
    place = f"row {row}" if leaf.position is None else f"row {row} of batch {leaf.position[1]}"
    if leaf.chosen is not None:
        place += f", which is row {int(leaf.chosen[row])} of the data,"
    others = f", and {count - 1} more of this batch are out of range too" if count > 1 else ""
    raise ValueError(
        f"The label of {place} is {label}, and the output has {given.classes} classes, whose labels are 0 to {given.classes - 1}{others}. The loss "
        f"{given.loss!r} would be 0 there. Correct the labels, or give the output more classes; labels that are not to count have the "
        f"sample_weight 0, or write keras.losses.SparseCategoricalCrossentropy(ignore_class={label})."
    )


SECONDS_BETWEEN_LOOKS = 1.0


class NotedLoss(NamedTuple):
    """The loss that a call of a step returned."""

    first: int
    last: int
    """The numbers of the first and the last step of the call, counted from 1 over the whole run."""
    loss: Array

    @property
    def is_finite(self) -> bool:
        return bool(np.all(np.isfinite(np.asarray(self.loss, "float32"))))


class LossWatch:
    """The losses of one call of fit that were not read yet."""

    def __init__(self) -> None:
        self._waiting: collections.deque[NotedLoss] = collections.deque()
        self._looked_at = time.perf_counter()
        self._is_said = False

    def note(self, steps: int, logs: Logs) -> None:
        """Note the logs of a call of this many steps. It was just started."""
        loss = logs.get("loss")
        if self._is_said or not isinstance(loss, jax.Array):
            return
        last = get_step_count().steps
        self._waiting.append(NotedLoss(last - steps + 1, last, loss))
        if time.perf_counter() - self._looked_at > SECONDS_BETWEEN_LOOKS:
            self.look()

    def look(self) -> None:
        """Warn once if a loss that has arrived is not finite. It waits for none."""
        self._looked_at = time.perf_counter()
        arrived = len(self._waiting)
        while arrived and not is_ready(self._waiting[arrived - 1].loss):
            arrived -= 1
        if not arrived:
            return
        if self._waiting[arrived - 1].is_finite:
            for _ in range(arrived):
                self._waiting.popleft()
            return
        self._is_said = True
        fault = next(noted for noted in self._waiting if not noted.is_finite)
        self._waiting.clear()
        warn_of_loss(fault)


def warn_of_loss(fault: NotedLoss) -> None:
    """Warn of the first loss that is not finite."""
    where = f"step {fault.last}" if fault.first == fault.last else f"one of the steps {fault.first} to {fault.last}"
    how = "this run is recorded" if is_recording() else "run the script once more with UNISONO_RECORD=run in the environment"
    warnings.warn(
        f"The loss is {float(np.asarray(fault.loss).ravel()[0])} in {where}. To find the row, the layer and the line of the first NaN or "
        f"infinity, {how}; then: unisono replay --run run SCRIPT",
        stacklevel=2,
    )
