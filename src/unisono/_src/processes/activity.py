"""What the main thread reports: its last step, and its work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

WORKING = "working"
"""The main thread runs the user's code, or anything else."""
WAITING = "waiting"
"""The main thread waits for other processes."""
BUSY = "busy"
"""The main thread does known work that may take long."""


class Activity:
    """The last finished step, and what the main thread does now.

    Every call is a few assignments: every step may be reported. In a single process nobody reads it.

    Example:
        >>> progress = Activity()
        >>> with progress.report_busy("compiling"):
        ...     progress.phase
        'busy'
        >>> progress.report_step(1)
        >>> progress.step, progress.phase
        (1, 'working')
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.phase = WORKING
        self.doing = ""
        self.moved_at = time.monotonic()

    def report_next_step(self) -> None:
        """Report the step after the last finished one."""
        self.report_step(1 if self.step is None else self.step + 1)

    def report_step(self, step: int) -> None:
        """Report a step whose results are there, or will surely come. A step that was only begun may never end."""
        self.step = step
        self.moved_at = time.monotonic()

    def report_waiting(self, words: str) -> contextlib.AbstractContextManager[None]:
        """Report a block in which this process waits for the others.

        It cannot end before they come to the same block. All processes pass the same words.
        """
        return self._in_phase(WAITING, words)

    def report_busy(self, words: str) -> contextlib.AbstractContextManager[None]:
        """Report a block of known work that may take long. It may be compiling: no process is stuck in it."""
        return self._in_phase(BUSY, words)

    @contextlib.contextmanager
    def _in_phase(self, phase: str, doing: str) -> Iterator[None]:
        before = self.phase, self.doing
        self.phase = phase
        self.doing = doing
        self.moved_at = time.monotonic()
        try:
            yield
        finally:
            self.phase, self.doing = before
            self.moved_at = time.monotonic()


_current = [Activity()]
"""The activity that the watch reads, once it has begun. A process has one, as it has one `jax.distributed`."""


def get_activity() -> Activity:
    """Get the object that the main thread reports to."""
    return _current[0]


def set_activity(activity: Activity) -> None:
    """Have the main thread report to another object from now on."""
    _current[0] = activity
