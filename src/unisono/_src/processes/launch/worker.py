"""The start of a worker, which dies with its launcher.

python worker.py LAUNCHER [-m] PROGRAM ARGUMENTS: it runs the program as Python would. It is started by its path and uses the standard
library alone, so that the program finds a Python in which nothing was imported.
"""

import ctypes
import os
import runpy
import signal
import sys
import types

PR_SET_PDEATHSIG = 1


def die_with_launcher(launcher: int) -> None:
    """Have the kernel kill this process when the launcher ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher ended before this call
        os._exit(1)


def run_program(words: list[str]) -> None:
    """Run the program with the arguments and import path of Python."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]  # they are pipes here
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.abspath(words[0]))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def strip_own_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Drop the frames of this file and of runpy from a traceback."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, runpy.run_path.__code__.co_filename):
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    die_with_launcher(int(sys.argv[1]))
    try:
        run_program(sys.argv[2:])
    except (Exception, KeyboardInterrupt) as error:
        error = error.with_traceback(strip_own_frames(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
