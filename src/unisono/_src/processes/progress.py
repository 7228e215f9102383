"""What the main thread says of itself as it goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from unisono._src.processes.record import BUSY, WAITING, WORKING


class Progress:
    """The last finished step, and what the main thread does now.

    Every call is a few assignments: steps may be reported as often as they are. In a single process nobody reads it.

    Example:
        >>> progress = Progress()
        >>> with progress.busy("compiling"):
        ...     progress.phase
        'busy'
        >>> progress.step_finished(1)
        >>> progress.step, progress.phase
        (1, 'working')
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.phase, self.doing, self.moved = WORKING, "", time.monotonic()

    def another_step_finished(self) -> None:
        """One more than those before."""
        self.step_finished(1 if self.step is None else self.step + 1)

    def step_finished(self, step: int) -> None:
        """Its results are there, or as good as there: a step that was only begun may never end."""
        self.step, self.moved = step, time.monotonic()

    @contextlib.contextmanager
    def waiting(self, words: str) -> Iterator[None]:
        """Around what cannot end before the other processes have come to the same place, of which all say the same words."""
        with self._in_phase(WAITING, words):
            yield

    @contextlib.contextmanager
    def busy(self, words: str) -> Iterator[None]:
        """Around known work that may take its time, such as compiling: nobody is stuck in it."""
        with self._in_phase(BUSY, words):
            yield

    @contextlib.contextmanager
    def _in_phase(self, phase: str, doing: str) -> Iterator[None]:
        before = self.phase, self.doing
        self.phase, self.doing, self.moved = phase, doing, time.monotonic()
        try:
            yield
        finally:
            (self.phase, self.doing), self.moved = before, time.monotonic()


_current = [Progress()]
"""What the watch of this process reads, once it has begun: one a process, as `jax.distributed`."""


def current() -> Progress:
    """What the main thread reports to; in a single process, what nobody reads."""
    return _current[0]


def report_to(progress: Progress) -> None:
    """From now on."""
    _current[0] = progress
