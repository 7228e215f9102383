"""Signals that ask a training to stop. They are noted when they arrive, and answered between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from unisono._src.processes.agreement import get_agreement

INTERRUPTED = 75
"""The exit code of a training that was asked to stop and saved itself: the code by which systems mean "try again"."""

SIGNALS = ("SIGTERM", "SIGINT")
"""The signals by which systems and people ask a program to end."""


class StopRequest:
    """A request to stop a training. It is made to this process or to another one."""

    def __init__(self) -> None:
        self.asked_by: str | None = None
        self.is_answered = False

    def exit_program(self, path: object) -> None:
        """End the program by SystemExit, which `finally` and `with` see. All processes leave together, since the
        saving may need each of them."""
        self.is_answered = True
        get_agreement().wait_for_processes("that it was asked to stop, and all is saved")
        if get_agreement().is_first:
            asked_by = self.asked_by or "Another process was asked to stop"
            print(
                f"{asked_by}: saved {path}; leaving with exit code {INTERRUPTED}. The same command goes on from there.",
                file=sys.stderr,
            )
        raise SystemExit(INTERRUPTED)

    @property
    def is_due(self) -> bool:
        """Whether all processes stop here, between two steps."""
        return get_agreement().agree_to_stop(self.asked_by is not None)

    def is_asked_in_any_process(self) -> bool:
        """Whether any process was asked to stop. The processes are asked, since no step follows that would tell them."""
        return get_agreement().is_true_in_any_process("whether it was asked to stop", self.asked_by is not None)


@contextlib.contextmanager
def listen_for_signals(names: Sequence[str]) -> Iterator[StopRequest]:
    """Note the first of these signals within the block. A second signal does what it did before.

    At the end of the block a signal that was not answered does so too: it may arrive when the last step is done. And so does each signal in a
    process that is forked within the block, as the workers of a dataset are: nobody has asked the training to stop.
    """
    stop = StopRequest()
    before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
    get_agreement().begin_anew()
    listener = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if stop.asked_by is not None or os.getpid() != listener:
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
                number = find_signal(name)
                before[number] = signal.signal(number, note)
        elif names:
            warnings.warn(
                f"{', '.join(names)} will not be heard: Python takes signals in its main thread, and this training runs in the thread "
                f"{threading.current_thread().name!r}. Train in the main thread, or write signals=() if nobody sends any.",
                stacklevel=4,
            )
        yield stop
    finally:
        # A process that leaves because of another process' signal may get its own signal now.
        if stop.asked_by is not None or not stop.is_answered:
            restore()
    if stop.asked_by is not None and not stop.is_answered:
        signal.raise_signal(find_signal(stop.asked_by))


def find_signal(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except KeyError:
        raise ValueError(
            f"signals received {name!r}, which this system does not know. Write names like 'SIGTERM' or 'SIGUSR1'."
        ) from None
