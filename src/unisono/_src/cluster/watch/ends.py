"""How a process ends when another one is lost, or when it is the lost one itself."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from unisono._src.cluster.watch import main_stack
from unisono._src.cluster.watch.verdict import Verdict
from unisono._src.cluster.watch.watch import Watch
from unisono._src.processes import names
from unisono._src.processes.record import ENDED, LEFT, RAISED

LAST_PART = 1 / 3
"""Of the bound, in which process 0 waits until the others have left."""

MOMENT = 1.0
"""Seconds for what should take none, but may hang because a process is lost."""


def answer(watch: Watch, verdict: Verdict) -> None:
    """Called by the judging thread, whose word is the last one where the main thread cannot leave by itself."""
    settled: list[Verdict] = []
    in_a_moment(lambda: settled.append(watch.board.settle(verdict)))
    first = settled[0] if settled else verdict
    if watch.state == RAISED or (first.process == watch.process and watch.state == ENDED):
        watch.decided.set()  # the main thread is on its way out, with a code of its own
    elif first.process == watch.process:
        end(watch, f"{first.words.partition(chr(10))[0]}\n{main_stack.of_main_thread()}", names.STUCK)
    else:
        end(watch, first.words, names.LOST)


def end(watch: Watch, words: str, code: int) -> None:
    """Says why, and ends this process from its side thread: the main one may never come back."""
    say(f"unisono: {words.rstrip()}\nunisono: process {watch.process} ends with exit code {code}.\n")
    watch.state = LEFT
    in_a_moment(lambda: watch.board.publish(watch.record()))
    for stream in (sys.stdout, sys.stderr):
        in_a_moment(stream.flush)
    if watch.process == 0:  # with it the store goes, in which the others read the verdict
        wait(watch.others_are_gone, watch.bound * LAST_PART)
    os._exit(code)


def say(text: str) -> None:
    """Past Python's buffers, whose lock the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def in_a_moment(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=quietly, args=(work,), daemon=True)
    thread.start()
    thread.join(MOMENT)


def quietly(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # this process ends in any case, and has said why
        work()


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    end_of_wait = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end_of_wait:
            return False
        time.sleep(0.05)
    return True
