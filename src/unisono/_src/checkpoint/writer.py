"""Writes beside the training, one at a time, whose failures are not lost."""

from __future__ import annotations

import concurrent.futures.thread as _first  # what is registered last is called first: see the end
import sys
import threading
import traceback
from collections.abc import Callable

from unisono._src.processes.progress import current


class Writer:
    """Runs functions one after another in the background.

    A failure is raised by the next call of `start` or `wait`. A process that ends waits for what was started, and prints a
    failure that nobody asked for.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="unisono-checkpoint")
        _unheard.add(self)
        self._thread.start()

    def wait(self) -> None:
        self.join()
        _unheard.discard(self)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Waits, and leaves a failure to who started the writing."""
        if self._thread is not None:
            with current().busy("writing a checkpoint"):
                self._thread.join()
            self._thread = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error


_unheard: set[Writer] = set()
"""Those that were started and not waited for."""


def wait_for_all() -> None:
    """Until this process writes nothing any more."""
    for writer in list(_unheard):
        writer.join()


def finish() -> None:
    """At the end of the process, while threads can still be started, which Orbax does."""
    for writer in list(_unheard):
        try:
            writer.wait()
        except BaseException:
            print("A checkpoint was not written:", file=sys.stderr)
            traceback.print_exc()


_ = _first
threading._register_atexit(finish)  # pyright: ignore[reportAttributeAccessIssue]  # atexit comes too late, and this has no public name
