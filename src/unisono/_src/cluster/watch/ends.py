"""The end of a process when another process is lost, or when it is the lost process itself."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from unisono._src.cluster.watch import main_stack
from unisono._src.cluster.watch.verdict import Verdict
from unisono._src.cluster.watch.watch import ProcessWatch
from unisono._src.processes import names
from unisono._src.processes.heartbeat import ENDED, LEFT, RAISED

LAST_PART = 1 / 3
"""The part of the bound in which process 0 waits until the others have left."""

MOMENT = 1.0
"""Seconds for a call that should take none, but may hang because a process is lost."""


def end_after_verdict(watch: ProcessWatch, verdict: Verdict) -> None:
    """Settle a verdict with the others, and end this process, unless its main thread is on its way out. The judging thread calls this."""
    settled: list[Verdict] = []
    run_briefly(lambda: settled.append(watch.board.settle(verdict)))
    first = settled[0] if settled else verdict
    if watch.state == RAISED or (first.process == watch.process and watch.state == ENDED):
        watch.is_decided.set()  # the main thread leaves, with an exit code of its own
    elif first.process == watch.process:
        end_process(watch, f"{first.words.partition(chr(10))[0]}\n{main_stack.format_main_stack()}", names.STUCK)
    else:
        end_process(watch, first.words, names.LOST)


def end_process(watch: ProcessWatch, words: str, code: int) -> None:
    """Say why, and end this process from a side thread: the main thread may never come back."""
    write_error(f"unisono: {words.rstrip()}\nunisono: process {watch.process} ends with exit code {code}.\n")
    watch.state = LEFT
    run_briefly(lambda: watch.board.publish_heartbeat(watch.record()))
    for stream in (sys.stdout, sys.stderr):
        run_briefly(stream.flush)
    if watch.process == 0:  # it keeps the store in which the others read the verdict
        wait_until(watch.others_are_gone, watch.bound * LAST_PART)
    os._exit(code)


def write_error(text: str) -> None:
    """Write to standard error without Python's buffers, whose lock the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def run_briefly(work: Callable[[], object]) -> None:
    """Run a function in a thread of its own, and wait for it no longer than a moment."""
    thread = threading.Thread(target=run_quietly, args=(work,), daemon=True)
    thread.start()
    thread.join(MOMENT)


def run_quietly(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # this process ends in any case, and has said why
        work()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition is true, and return whether it was in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
