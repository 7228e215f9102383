"""The start of the watch, and the hooks for this process' end."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import sys
import traceback
import types

from unisono._src.processes.activity import Activity, get_activity, set_activity
from unisono._src.processes.environments.connect import read_bound
from unisono._src.processes.watch.board import ENDED, FAILING, RAISED, RUNNING
from unisono._src.processes.watch.ends import LAST_PART, MOMENT, POLL, end_after_verdict, run_briefly, wait_until
from unisono._src.processes.watch.watch import ProcessWatch
from unisono._src.programs.private import distributed

STATUS = re.compile(r"([A-Z_]+): ")
"""The beginning of errors of what runs below JAX, whatever class JAX gives them."""

OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
"""Statuses of errors that a process has by itself."""

RAISING = ("jax", "jaxlib", "unisono")
"""The packages that raise errors of an exchange. JAX takes its own frames out, so that the error seems to come from Unisono, which asked
for the exchange."""


def begin_watch() -> Activity:
    """Begin the watch of this process, and return its activity.

    The main thread reports to that object; later calls return the same one. Call it right after `connect_processes`. From then on the other
    processes are told when this process ends, by an error or not, and the end waits until none of them needs this process any more. In a
    single process there is no watch.

    Example:
        >>> begin_watch().report_step(1)
    """
    processes, process = distributed.get_process_count_and_number()
    client = distributed.get_client()
    if processes == 1 or client is None or isinstance(get_activity(), ProcessWatch):
        return get_activity()
    watch = ProcessWatch(process, processes, client, read_bound())
    hook_end(watch)
    delay_aborts()
    watch.start(end_after_verdict)
    set_activity(watch)
    watch.all_met.wait()  # a process that is lost in the first step, be it process 0 with its store, can then be named like any other
    return watch


def hook_end(watch: ProcessWatch) -> None:
    """Tell the others when this process ends.

    The hooks are for an error of the main thread, and for the interpreter's end. JAX was imported before, so that it disconnects after
    them.
    """
    earlier_hook = sys.excepthook
    pid = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
        if os.getpid() != pid:  # a fork of this process
            earlier_hook(kind, error, frames)
            return
        if is_fault_of_others(error):  # the watch notices within the bound who is lost, says so and ends this process
            watch.publish_state(FAILING)
            watch.is_decided.wait(watch.bound)
        earlier_hook(kind, error, frames)
        tell_failure(watch, error)

    def at_exit() -> None:
        if os.getpid() == pid:
            tell_end(watch)

    sys.excepthook = hook
    atexit.register(at_exit)


def delay_aborts() -> None:
    """Delay each abort by six seconds, so that the watch can speak.

    If process 0 is gone, JAX' client aborts the process within a tenth of a second, without naming the lost process. The abort sleeps in
    its own thread.

    The handler of SIGABRT becomes C's `sleep`, whose argument, the number of seconds, is the number of the signal. Then the abort goes on.
    `sleep` may be called in a handler; Python code may not. JAX takes no callback instead (jaxlib 0.10.2 has one, which crashes when it is
    called).
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def is_fault_of_others(error: BaseException | None) -> bool:
    """Whether an error, or its cause, may be another process' fault.

    When a process is gone, the others get errors too, out of their exchange with it.

    Example:
        >>> is_fault_of_others(ValueError("UNKNOWN: the user's own words"))
        False
    """
    while error is not None:
        status = STATUS.match(str(error))
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if status and status[1] not in OWN and modules and modules[-1].partition(".")[0] in RAISING:
            return True
        error = error.__cause__ or error.__context__
    return False


def tell_failure(watch: ProcessWatch, error: BaseException) -> None:
    """Tell the others of the error before this process goes. It may keep the store, without which nobody hears of it."""
    verdict = watch.fail(error)
    run_briefly(lambda: watch.board.settle(verdict))
    wait_until(watch.others_are_done, watch.bound)
    if watch.process == 0:  # it keeps the store: if it goes first, JAX aborts the others, with a page of its own words
        wait_until(watch.others_are_gone, watch.bound * LAST_PART)
    disconnect(watch)


def tell_end(watch: ProcessWatch) -> None:
    """Tell the others of the program's end, and wait for them.

    It waits for slower processes as JAX would, but without JAX' limit.
    """
    if watch.state == RAISED or distributed.get_client() is None:
        return
    if watch.state == RUNNING:
        watch.publish_state(ENDED)
    while not watch.others_are_done():
        if watch.is_decided.wait(POLL):
            break
    if watch.others_have_ended():
        run_briefly(lambda: watch.board.publish_heartbeat(watch.make_heartbeat()))  # the last one, for which the others wait
        watch.rest(MOMENT)
    else:
        disconnect(watch)


def disconnect(watch: ProcessWatch) -> None:
    """Stop the watch, and forget the connection to the others."""
    watch.rest(MOMENT)
    distributed.forget_connection()
