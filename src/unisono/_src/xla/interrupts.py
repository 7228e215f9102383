"""Delay Ctrl-C while the state changes hands.

A call of a program donates the old arrays before the new ones are assigned. An interrupt in between would lose the state.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay SIGINT until the end of the block."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    delayed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: delayed.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if delayed:
            handler(*delayed[-1])
