"""Watch for a loss that is not finite.

It prints one line: the step, and the command that finds the row and the line of code. Reading a loss waits for its step. So only
losses that have arrived are read, and once in a while the newest one alone: the log "loss" is a mean over the epoch, which stays
NaN, and so do weights that a NaN has reached. Where the newest is not finite, those before it are read.
"""

from __future__ import annotations

import collections
import time
import warnings
from typing import NamedTuple

import jax
import numpy as np

from unisono._src.engine.step_count import get_step_count
from unisono._src.keras.record.run_recorder import is_recording
from unisono._src.typed_jax import is_ready
from unisono._src.typing import Array, Logs

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
