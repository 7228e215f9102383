"""The begin of the watch of this process, and the hooks that tell the others of its end."""

from __future__ import annotations

import atexit
import os
import sys
import types
from typing import cast

from unisono._src.cluster.connect import read_bound
from unisono._src.cluster.watch import abort
from unisono._src.cluster.watch.blame import is_fault_of_others
from unisono._src.cluster.watch.ends import MOMENT, end_after_verdict, run_briefly, wait_until
from unisono._src.cluster.watch.watch import ProcessWatch
from unisono._src.jax_private import distributed
from unisono._src.processes.activity import Activity, get_activity, set_activity
from unisono._src.processes.heartbeat import ENDED, FAILING, RAISED, RUNNING

POLL = 0.05
"""Seconds between two looks at the other processes, when the program is over."""


def begin_watch(bound: float | None = None) -> Activity:
    """Begin the watch of this process, and return the object that the main thread reports to. Later calls return the same object.

    Call it right after `connect`. From then on the other processes are told of the end of this process, by an error or not, and the end
    waits until none of them needs this process any more. In a single process there is no watch.

    Args:
        bound: Seconds; by default those of the environment variable UNISONO_BOUND, or 30.

    Example:
        >>> begin_watch().report_step(1)
    """
    processes, process = distributed.get_process_count_and_number()
    if processes == 1 or isinstance(get_activity(), ProcessWatch):
        return get_activity()
    return start_threads(processes, process, read_bound(bound))


def start_threads(processes: int, process: int, bound: float) -> ProcessWatch:
    """Install the hooks, start the threads of the watch, and return it when all processes have been heard of."""
    watch = ProcessWatch(process, processes, cast(distributed.KeyValueStore, distributed.get_client()), bound)
    hook_end(watch)
    abort.delay_aborts()
    watch.start(end_after_verdict)
    set_activity(watch)
    watch.all_met.wait()  # a process that is lost in the first step, be it process 0 with its store, can then be named like any other
    return watch


def hook_end(watch: ProcessWatch) -> None:
    """Have the others told of the end of this process: by an error of the main thread, and by the interpreter's end. JAX, which was imported
    before, disconnects after that."""
    earlier_hook = sys.excepthook
    pid = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        if os.getpid() != pid:  # a fork of this process
            earlier_hook(kind, error, traceback)
            return
        if is_fault_of_others(error):
            wait_for_verdict(watch)
        earlier_hook(kind, error, traceback)
        tell_failure(watch, error)

    def at_exit() -> None:
        if os.getpid() == pid:
            tell_end(watch)

    sys.excepthook = hook
    atexit.register(at_exit)


def wait_for_verdict(watch: ProcessWatch) -> None:
    """Wait, after an error, for a verdict on another process. Where one is the reason of the error, the watch notices it within the bound,
    says so and ends this process."""
    watch.state = FAILING
    watch.publish_soon()
    watch.is_decided.wait(watch.bound)


def tell_failure(watch: ProcessWatch, error: BaseException) -> None:
    """Tell the others of the error while this process, which may keep the store, is still there."""
    verdict = watch.fail(error)
    run_briefly(lambda: watch.board.settle(verdict))
    wait_until(watch.others_are_done, watch.bound)
    disconnect(watch)


def tell_end(watch: ProcessWatch) -> None:
    """Tell the others that the program has ended, and wait for slower processes as JAX would, but without JAX' limit."""
    if watch.state == RAISED or distributed.get_client() is None:
        return
    if watch.state == RUNNING:
        watch.state = ENDED
        watch.publish_soon()
    while not watch.others_are_done():
        if watch.is_decided.wait(POLL):
            break
    if watch.others_have_ended():
        run_briefly(
            lambda: watch.board.publish_heartbeat(watch.record())
        )  # the last heartbeat, for which the other processes wait
        watch.rest(MOMENT)
    else:
        disconnect(watch)


def disconnect(watch: ProcessWatch) -> None:
    """Stop the watch, and forget the connection to the other processes."""
    watch.rest(MOMENT)
    distributed.forget_connection()
