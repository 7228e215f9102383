"""The time of compiling in a training, and of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import keras

from unisono._src.typing import Logs


class EpochTimes(keras.callbacks.Callback):
    """Times each epoch of a `fit`, with its validation and without.

    The first epoch compiles every program, those of a smaller last batch and of the validation too. So what it takes longer than a
    later one is what compiling takes. It has no method for batches, since those would let `fit` call each step by itself.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self.epochs: list[float] = []
        self.trainings: list[float] = []

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        self._steps: int = params["steps"]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._began = self._clock()
        self._trained: float | None = None

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._trained = self._clock()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        ended = self._clock()
        self.epochs.append(ended - self._began)
        self.trainings.append((ended if self._trained is None else self._trained) - self._began)

    @property
    def compiling(self) -> float | None:
        """Seconds that compiling took; None for a single epoch. The first epoch took so much longer than a later one."""
        return max(0.0, self.epochs[0] - statistics.median(self.epochs[1:])) if len(self.epochs) > 1 else None

    @property
    def step(self) -> float | None:
        """Seconds of a step in later epochs; None for a single epoch."""
        return statistics.median(self.trainings[1:]) / self._steps if len(self.epochs) > 1 else None
