"""Several batches in one call of a step: how many, when, and the logs that are shown."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import jax

from unisono._src.keras.fit.bond import Bond
from unisono._src.keras.fit.call_arguments import has_batch_callbacks, read_argument
from unisono._src.keras.private.data_adapters import has_known_length
from unisono._src.keras.private.epoch_steps import EpochSteps
from unisono._src.keras.private.models import overrides_method
from unisono._src.typing import Arguments, KerasObject, Keywords, Logs, UserBatch

SECONDS = 0.5
MOST_SECONDS = 2.0
SLOW_STEPS = 6
SECONDS_BETWEEN_LOGS = 0.1
MOST_STEPS = 256
GROWTH = 4


class StepsPerCall:
    """The steps per call of one loop over batches.

    Nothing in the loop needs to see single batches.
    """

    def __init__(self) -> None:
        self._steps = 1
        self._running: tuple[int, Logs] | None = None
        self._since = 0.0
        self._shown: Logs | None = None
        self._shown_at = 0.0

    def steps(self) -> int:
        """The number of steps of the next call."""
        return self._steps

    def begin_epoch(self) -> None:
        """Forget the logs shown in another epoch."""
        self._shown = None

    def note_call(self, count: int, logs: Logs, are_shown: bool = False) -> Logs:
        """Note a call just started, and wait for the one before. At most two run at a time.

        Args:
            count: The number of steps.
            logs: Their logs.
            are_shown: Whether these logs are needed: they are the last ones of an epoch, or the step makes logs that are in no metric.

        Returns:
            The logs to show: these logs, or the logs that were shown last in this epoch, if that was just now.
        """
        if self._running is not None:
            count_before, logs_before = self._running
            jax.block_until_ready(logs_before)
            now = time.perf_counter()
            self._steps = min(choose_step_count(max(now - self._since, 1e-9) / count_before), GROWTH * self._steps, MOST_STEPS)
        self._running = count, logs
        self._since = time.perf_counter()
        if self._since - self._shown_at > SECONDS_BETWEEN_LOGS or self._shown is None or are_shown:
            self._shown = logs
            self._shown_at = self._since
        return self._shown


def choose_step_count(seconds: float) -> int:
    """Choose how many steps of this duration one call may take.

    Together they are short, or they are a few that do not take too long.

    >>> [choose_step_count(seconds) for seconds in (0.01, 0.2, 0.5, 2.5)]
    [50, 6, 4, 1]
    """
    return max(int(SECONDS / seconds), min(int(MOST_SECONDS / seconds), SLOW_STEPS), 1)


class BatchGroup:
    """The batches of one call."""

    def __init__(self, batches: Iterator[UserBatch], count: int, steps_per_call: StepsPerCall, is_last: bool) -> None:
        """Take `count` batches. `is_last`: the epoch ends with them."""
        self._batches = itertools.islice(batches, count)
        self.count = count
        self.steps_per_call = steps_per_call
        self.is_last = is_last

    def __iter__(self) -> Iterator[UserBatch]:
        return self._batches

    def __next__(self) -> UserBatch:
        return next(self._batches)


class BatchGrouping:
    """The permission to group the batches of a model's loops."""

    def __init__(self, bond: Bond) -> None:
        self._bond = bond
        self._is_allowed = False

    @contextlib.contextmanager
    def allow(self, method: str, mode: str, args: Arguments, kwargs: Keywords) -> Iterator[None]:
        """Allow groups during a call of fit or evaluate. They are not allowed where something could see the difference."""
        callbacks = read_argument(method, "callbacks", args, kwargs)
        outer = self._is_allowed
        self._is_allowed = not (overrides_method(self._bond.model, method) or has_batch_callbacks(callbacks, mode))
        try:
            yield
        finally:
            self._is_allowed = outer

    def group_steps(self, iterator: KerasObject, epochs: EpochSteps) -> None:
        """Let a loop take several steps in one call, if it may."""
        if not self._can_group(iterator):
            return
        steps_per_call = StepsPerCall()
        data_position = self._bond.data_position

        def count_steps(step: int) -> int:
            most = data_position.most_steps(step) if data_position is not None else None
            return steps_per_call.steps() if most is None else min(steps_per_call.steps(), most)

        def group(batches: Iterator[UserBatch], count: int, is_first: bool, is_last: bool) -> BatchGroup:
            if is_first:
                steps_per_call.begin_epoch()
            return BatchGroup(batches, count, steps_per_call, is_last)

        epochs.group_steps(count_steps, group)

    def _can_group(self, iterator: KerasObject) -> bool:
        """Whether one call may take several batches.

        A generator may not: it may look at the model after each batch. Nor may processes that share the reading: each chooses by its own
        clock and callbacks how many it takes, and they must ask for each batch at the same time.
        """
        source = iterator.data_adapter
        one_by_one = source.is_stream or source.is_shared or self._bond.model.steps_per_execution != 1 or self._bond.is_eager
        return self._is_allowed and not one_by_one and has_known_length(iterator)
