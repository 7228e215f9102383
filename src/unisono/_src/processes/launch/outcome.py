"""The process that failed first.

When one process is gone the others fail too, and the user must not look for the reason there.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence

from unisono._src.processes import names


@dataclasses.dataclass(frozen=True)
class ProcessEnd:
    """The end of one process."""

    process: int
    status: int
    """The exit code. A negative one is the signal that killed the process."""
    forced: bool
    """The launcher has ended it."""
    last_words: tuple[str, ...] = ()
    """Its last traceback."""
    was_stopped: bool = False
    """It was alone, and stopped (SIGSTOP) for longer than the bound."""

    @property
    def code(self) -> int:
        """The exit code as a shell counts it: 128 plus the signal."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def is_failure(self) -> bool:
        return self.code not in (0, names.LEFT_ON_REQUEST)

    @property
    def consequence_rank(self) -> int:
        """How surely another process failed first; 0 for an own failure."""
        if self.code == names.LOST:
            return 3
        if self.forced:
            return 2
        return 1 if self.status == -signal.SIGABRT else 0  # what JAX does if its coordinator is gone

    def __str__(self) -> str:
        if self.was_stopped:
            return f"process {self.process} was stopped (SIGSTOP), and was ended"
        if self.forced:
            return f"process {self.process} did not end by itself, and was ended"
        if self.status < 0:
            return f"process {self.process} was killed by {signal.Signals(-self.status).name}"
        return f"process {self.process} failed with exit code {self.code}"


def find_first_failure(ends: Sequence[ProcessEnd]) -> ProcessEnd | None:
    """Find the most likely first cause; of equals, the earliest."""
    return min((end for end in ends if end.is_failure), key=lambda end: end.consequence_rank, default=None)


def count_own_failures(ends: Sequence[ProcessEnd]) -> int:
    """Count the processes that failed by themselves. After a failure there is at least one."""
    return max(sum(end.is_failure and end.consequence_rank < 2 for end in ends), 1)
