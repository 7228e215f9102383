"""Begins the watch of this process, and sees that its own end is told to the others."""

from __future__ import annotations

import atexit
import os
import sys
import types
from typing import Any

from unisono._src.cluster.connect import bound_of
from unisono._src.cluster.watch import abort
from unisono._src.cluster.watch.blame import is_of_others
from unisono._src.cluster.watch.ends import MOMENT, answer, in_a_moment, wait
from unisono._src.cluster.watch.watch import Watch
from unisono._src.jax_private import distributed
from unisono._src.processes.progress import Progress, current, report_to
from unisono._src.processes.record import ENDED, FAILING, RAISED, RUNNING

POLL = 0.05
"""Seconds between two looks at the others, when the program is over."""


def start(bound: float | None = None) -> Progress:
    """Begins the watch of this process, and returns what the main thread reports to; later calls return the same one.

    To be called right after `connect`. From then on the end of this process, by an error or as it should be, is told to the others,
    and waits until none of them needs it any more. In a single process there is no watch.

    Args:
        bound: Seconds; by default those of the environment variable UNISONO_BOUND, or 30.

    Example:
        >>> start().step_finished(1)
    """
    processes, process = distributed.place()
    if processes == 1 or isinstance(current(), Watch):
        return current()
    return watched(processes, process, bound_of(bound))


def watched(processes: int, process: int, bound: float) -> Watch:
    watch = Watch(process, processes, distributed.client(), bound)
    tell_of_the_end(watch)
    abort.delay()
    watch.start(answer)
    report_to(watch)
    watch.met.wait()  # who is lost in the first step, process 0 with its store, can be named like any other
    return watch


def tell_of_the_end(watch: Watch) -> None:
    """By an error of the main thread, and by the interpreter's end; JAX, imported before, takes leave of the others after that."""
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> Any:
        if os.getpid() != pid:  # a fork of it
            before(kind, error, traceback)
            return
        if is_of_others(error):
            look_for_the_reason(watch)
        before(kind, error, traceback)
        failed(watch, error)

    def at_exit() -> None:
        if os.getpid() == pid:
            ended(watch)

    sys.excepthook = hook
    atexit.register(at_exit)


def look_for_the_reason(watch: Watch) -> None:
    """Where another process is the reason of an error, the watch finds it within the bound, says so and ends this process."""
    watch.state = FAILING
    watch.tell()
    watch.decided.wait(watch.bound)


def failed(watch: Watch, error: BaseException) -> None:
    """The others learn of the error while this process, which may keep the store, is still there."""
    verdict = watch.fail(error)
    in_a_moment(lambda: watch.board.settle(verdict))
    wait(watch.others_are_done, watch.bound)
    leave(watch)


def ended(watch: Watch) -> None:
    """Whoever needs longer is waited for, as JAX would, but without JAX' limit."""
    if watch.state == RAISED or distributed.client() is None:
        return
    if watch.state == RUNNING:
        watch.state = ENDED
        watch.tell()
    while not watch.others_are_done():
        if watch.decided.wait(POLL):
            break
    if watch.others_have_ended():
        in_a_moment(lambda: watch.board.publish(watch.record()))  # the last word, which those who wait for this process await
        watch.rest(MOMENT)
    else:
        leave(watch)


def leave(watch: Watch) -> None:
    watch.rest(MOMENT)
    distributed.leave_unseen()
