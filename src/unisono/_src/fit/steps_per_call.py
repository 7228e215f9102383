"""How many steps a call takes, and how often its logs are read.

Neither changes a bit. A call should be long enough that Python costs little, and short enough for the progress bar and for
Ctrl-C; reading logs waits for the step that makes them, and nobody reads more than a few a second.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax

SECONDS = 0.1
MOST_SECONDS = 3.0
SLOW_STEPS = 3
MOST_STEPS = 256
GROWTH = 4


class Pace:
    """Of one loop over batches, in which nothing looks at single batches."""

    def __init__(self) -> None:
        self._steps = 1
        self._running: tuple[int, Any] | None = None
        self._since = 0.0
        self._shown: Any = None
        self._shown_at = 0.0

    def steps(self) -> int:
        """For the next call."""
        return self._steps

    def called(self, count: int, logs: dict[str, Any], says_more: bool = False) -> dict[str, Any]:
        """After a call of so many steps was started: waits for the one before it, so that two are under way at most.

        Returns:
            The logs to show: these, or where others were shown just now, those. In the end Keras asks the metrics, not the
            last logs, unless they say more than the metrics.
        """
        if self._running is not None:
            before, its_logs = self._running
            jax.block_until_ready(its_logs)
            now = time.perf_counter()
            self._steps = min(fitting(max(now - self._since, 1e-9) / before), GROWTH * self._steps, MOST_STEPS)
        self._running, self._since = (count, logs), time.perf_counter()
        if self._since - self._shown_at > SECONDS or self._shown is None or says_more:
            self._shown, self._shown_at = logs, self._since
        return self._shown


def fitting(seconds: float) -> int:
    """How many steps of so many seconds a call may take: as many as are short together, or a few that are not too long.

    A call's memory is new, and on CPU the system clears it page by page.
    """
    return max(int(SECONDS / seconds), min(int(MOST_SECONDS / seconds), SLOW_STEPS), 1)


class Group:
    """The batches of one call."""

    def __init__(self, batches: Iterator[Any], count: int, pace: Pace) -> None:
        self._batches = itertools.islice(batches, count)
        self.count = count
        self.pace = pace

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __next__(self) -> Any:
        return next(self._batches)
