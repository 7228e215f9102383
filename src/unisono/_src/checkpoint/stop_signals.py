"""Signals that ask a training to stop: noted when they come, and answered between two steps."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from unisono._src.processes.agreement import current

INTERRUPTED = 75
"""The exit code of a training that was asked to stop and saved itself: the system's word for "try again"."""


SIGNALS = ("SIGTERM", "SIGINT")
"""By which systems and people ask a program to end."""


class Stop:
    """Whether somebody has asked: this process, or another one of those that train together."""

    def __init__(self) -> None:
        self.asked_by: str | None = None
        self.is_answered = False

    def leave(self, path: Any) -> None:
        """Ends the program, by an exit that `finally` and `with` see. All leave together: who leaves before it is saved may be missed."""
        self.is_answered = True
        current().meet("that it was asked to stop, and all is saved")
        if current().is_first:
            asked_by = self.asked_by or "Another process was asked to stop"
            print(
                f"{asked_by}: saved {path}; leaving with exit code {INTERRUPTED}. The same command goes on from there.",
                file=sys.stderr,
            )
        raise SystemExit(INTERRUPTED)

    @property
    def is_due(self) -> bool:
        """Between two steps: whether all processes stop here."""
        return current().stops(self.asked_by is not None)

    def is_asked_anywhere(self) -> bool:
        """Where no more steps come, with which the others would be told."""
        return current().any_("whether it was asked to stop", self.asked_by is not None)


@contextlib.contextmanager
def listening(names: Sequence[str]) -> Iterator[Stop]:
    """For the block, the first of these signals is noted; a second one does what it did before.

    So does the first at the end of the block, where nobody has answered it: it may come when the last step is done.
    """
    stop, before = Stop(), {}
    current().begin_anew()

    def note(number: int, frame: Any) -> None:
        if stop.asked_by is not None:
            restore()
            signal.raise_signal(number)
            return
        stop.asked_by = signal.Signals(number).name
        what = "leaving already" if stop.is_answered else "saving after this step"
        print(f"{stop.asked_by}: {what}. Once more ends at once.", file=sys.stderr)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        before.clear()

    try:
        if threading.current_thread() is threading.main_thread():  # Python takes signals nowhere else
            for name in names:
                number = numbered(name)
                before[number] = signal.signal(number, note)
        elif names:
            warnings.warn(
                f"{', '.join(names)} will not be heard: Python takes signals in its main thread, and this training runs in the thread "
                f"{threading.current_thread().name!r}. Train in the main thread, or write signals=() if nobody sends any.",
                stacklevel=4,
            )
        yield stop
    finally:
        if (
            stop.asked_by is not None or not stop.is_answered
        ):  # a process that leaves for another one's signal may get its own now
            restore()
    if stop.asked_by is not None and not stop.is_answered:
        signal.raise_signal(numbered(stop.asked_by))


def numbered(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except KeyError:
        raise ValueError(
            f"signals received {name!r}, which this system does not know. Write names like 'SIGTERM' or 'SIGUSR1'."
        ) from None
