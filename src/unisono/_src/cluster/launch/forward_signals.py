"""Signals that the launcher receives are the workers'."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AT_ONCE = 3
"""Asked so often to end, the launcher asks nobody any more: a worker inside of compiled code hears no signal."""


class Signals:
    """What has come and was not yet passed on."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._asked_to_end = 0

    @property
    def is_ending(self) -> bool:
        """Whether somebody wants the run to end, so that it is not started again."""
        return self._asked_to_end > 0

    @property
    def at_once(self) -> bool:
        return self._asked_to_end >= AT_ONCE

    def take(self) -> list[int]:
        taken, self._waiting = self._waiting, []
        return taken

    def note(self, number: int, frame: Any) -> None:
        self._waiting.append(number)
        self._asked_to_end += number in ENDING


@contextlib.contextmanager
def passed_on() -> Iterator[Signals]:
    """For the block, what comes is noted."""
    signals = Signals()
    before = {number: signal.signal(number, signals.note) for number in PASSED_ON}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
