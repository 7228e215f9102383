"""Signals that the launcher receives, and passes on to the workers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (*ENDING, signal.SIGUSR1)
AT_ONCE = 3
"""The number of requests to end after which the launcher kills the workers: a worker inside of compiled code hears no signal."""


class PendingSignals:
    """The signals that have come and were not yet passed on."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        self._asked_to_end = 0

    @property
    def is_ending(self) -> bool:
        """Return whether the launcher was asked to end: the run is not started again then."""
        return self._asked_to_end > 0

    @property
    def must_kill(self) -> bool:
        return self._asked_to_end >= AT_ONCE

    def take(self) -> list[int]:
        """Return the pending signals, and forget them."""
        taken = self._pending
        self._pending = []
        return taken

    def note(self, number: int, frame: FrameType | None) -> None:
        """Add a signal to the pending ones, as its handler."""
        self._pending.append(number)
        self._asked_to_end += number in ENDING


@contextlib.contextmanager
def collect_signals() -> Iterator[PendingSignals]:
    """Collect, for the block, the signals that come."""
    signals = PendingSignals()
    before = {number: signal.signal(number, signals.note) for number in PASSED_ON}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
