"""Steps per call, and the logs that are shown.

A call should be long enough that its memory and Python cost little. XLA asks for the memory of a step anew in each call, and the
system clears it page by page: of MobileNetV2's step on two cores this took a sixth with calls of three steps. A call should be
short enough for the progress bar and for Ctrl-C. Reading logs waits for the step that computes them, and nobody reads more than a
few logs a second. The first and the last call of an epoch show their own: the epoch before has other values, and the last line of
an epoch is its result. The number of steps per call changes no bit.
"""

from __future__ import annotations

import time

import jax

from unisono._src.typing import Logs

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
