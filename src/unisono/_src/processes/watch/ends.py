"""The end of a process after a verdict. Another process is lost, or this one is the lost process itself."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from unisono._src.processes import names
from unisono._src.processes.watch.board import ENDED, LEFT, RAISED, Verdict
from unisono._src.processes.watch.watch import ProcessWatch, format_stack

T = TypeVar("T")

LAST_PART = 1 / 3
"""The part of the bound for which process 0 waits until the others have left."""

MOMENT = 1.0
"""Seconds for a call that should take none, but may hang because a process is lost."""

POLL = 0.05
"""Seconds between two looks at the other processes."""


def end_after_verdict(watch: ProcessWatch, verdict: Verdict) -> None:
    """Settle a verdict with the others, and end this process.

    It does not end a process whose main thread is on its way out. The judging thread calls this.
    """
    first = run_briefly(lambda: watch.board.settle(verdict)) or verdict
    if watch.state == RAISED or (first.process == watch.process and watch.state == ENDED):
        watch.is_decided.set()  # the main thread leaves, with an exit code of its own
    elif first.process == watch.process:
        end_process(watch, f"{first.words.partition(chr(10))[0]}\n{format_stack(watch.thread)}", names.STUCK)
    else:
        end_process(watch, first.words, names.LOST)


def end_process(watch: ProcessWatch, words: str, code: int) -> None:
    """Say why, and end this process from a side thread. The main thread may never come back."""
    text = f"unisono: {words.rstrip()}\nunisono: process {watch.process} ends with exit code {code}.\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())  # without Python's buffers, whose lock the main thread may hold
    watch.state = LEFT
    run_briefly(lambda: watch.board.publish_heartbeat(watch.make_heartbeat()))
    for stream in (sys.stdout, sys.stderr):
        run_briefly(stream.flush)
    if watch.process == 0:  # it keeps the store in which the others read the verdict
        wait_until(watch.others_are_gone, watch.bound * LAST_PART)
    os._exit(code)


def run_briefly(work: Callable[[], T]) -> T | None:
    """Run a function in its own thread, for a moment at most. None if it fails or takes longer."""
    results: list[T] = []

    def run_quietly() -> None:
        with contextlib.suppress(Exception):  # this process ends in any case, and has said why
            results.append(work())

    thread = threading.Thread(target=run_quietly, daemon=True)
    thread.start()
    thread.join(MOMENT)
    return results[0] if results else None


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, for some seconds at most."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL)
