"""Write in the background, one checkpoint at a time. No failure is lost."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

from unisono._src.processes.activity import get_activity

written_first: list[Callable[[], None]] = []
"""What is called before each checkpoint, in the thread that writes it. It writes files of steps that a run which resumes from the checkpoint
does not take again."""


class BackgroundWriter:
    """A thread that runs one function at a time in the background.

    A process that ends waits for it, and prints a failure that was not raised.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Start to write, then raise the last write's failure. So this write is not lost because of the last one."""
        self.join()
        error, self._error = self._error, None
        self._thread = threading.Thread(target=self._run, args=(write,), name="unisono-checkpoint")
        _unfinished.add(self)
        self._thread.start()
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until nothing is written. A failed write is raised."""
        self.join()
        _unfinished.discard(self)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait until nothing is written. A failure is left to the next `start` or `wait`."""
        if self._thread is not None:
            with get_activity().report_busy("writing a checkpoint"):
                self._thread.join()
            self._thread = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the last write has ended, and failed."""
        return self._error is not None and not self.is_busy

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error


_unfinished: set[BackgroundWriter] = set()
"""The writers that may still write, or that hold a failure."""


def wait_for_writers() -> None:
    """Wait until this process writes nothing any more."""
    for writer in list(_unfinished):
        writer.join()


def finish_writes() -> None:
    """Wait for all writers, and print their failures. It is called at the end of the process."""
    for writer in list(_unfinished):
        try:
            writer.wait()
        except BaseException:
            print("A checkpoint was not written:", file=sys.stderr)
            traceback.print_exc()


threading._register_atexit(finish_writes)  # pyright: ignore[reportAttributeAccessIssue]  # atexit comes after threads have been joined
