"""Reports of the main thread: its last finished step, and what it does now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from unisono._src.processes.record import BUSY, WAITING, WORKING


class Progress:
    """The last finished step, and what the main thread does now.

    Every call is a few assignments: every step may be reported. In a single process nobody reads it.

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
        self.phase = WORKING
        self.doing = ""
        self.moved = time.monotonic()

    def another_step_finished(self) -> None:
        """Report the step after the last finished one."""
        self.step_finished(1 if self.step is None else self.step + 1)

    def step_finished(self, step: int) -> None:
        """Report a step whose results are there, or will surely come. A step that was only begun may never end."""
        self.step = step
        self.moved = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, words: str) -> Iterator[None]:
        """Report a block that cannot end before the other processes come to the same block. All processes pass the same words."""
        with self._in_phase(WAITING, words):
            yield

    @contextlib.contextmanager
    def busy(self, words: str) -> Iterator[None]:
        """Report a block of known work that may take long, such as compiling: no process is stuck in it."""
        with self._in_phase(BUSY, words):
            yield

    @contextlib.contextmanager
    def _in_phase(self, phase: str, doing: str) -> Iterator[None]:
        before = self.phase, self.doing
        self.phase = phase
        self.doing = doing
        self.moved = time.monotonic()
        try:
            yield
        finally:
            self.phase, self.doing = before
            self.moved = time.monotonic()


_current = [Progress()]
"""What the watch of this process reads, once it has begun: one for each process, as `jax.distributed`."""


def current() -> Progress:
    """Return the object that the main thread reports to. In a single process nobody reads it."""
    return _current[0]


def report_to(progress: Progress) -> None:
    """Set the object that the main thread reports to from now on."""
    _current[0] = progress
