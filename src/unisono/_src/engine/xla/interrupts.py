"""Delay Ctrl-C while the state changes hands.

A call of a program donates the old arrays before the new ones are assigned. An interrupt in between would lose the state.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupts:
    """SIGINT of one thread, delayed inside `with interrupts:` blocks. It takes effect at the end of the block."""

    def __init__(self) -> None:
        self._is_of_python = signal.getsignal(signal.SIGINT) is not None
        """Whether it can be put back."""
        self._is_delayed = False
        self._waiting: tuple[int, FrameType | None] | None = None
        self._handler: Callable[[int, FrameType | None], object] = signal.default_int_handler

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Take over SIGINT for calls that open such blocks.

        To do so for each block is a sixth of what Python does for a small step.
        """
        if not self._is_of_python or threading.current_thread() is not threading.main_thread():
            yield
            return
        handler = signal.signal(signal.SIGINT, self._receive)
        if callable(handler):
            self._handler = handler
        else:  # it is ignored
            signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            newest = signal.signal(signal.SIGINT, handler)
            if newest != self._receive:  # the user's code has set another one
                signal.signal(signal.SIGINT, newest)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_delayed:
            self._waiting = number, frame
        else:
            self._handler(number, frame)

    def __enter__(self) -> None:
        self._is_delayed = True

    def __exit__(self, *_: object) -> None:
        self._is_delayed = False
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._receive(*waiting)
