"""A delay of aborts, in which the watch can speak.

Where process 0 is gone, JAX' client aborts the process within a tenth of a second, without naming the lost process. It takes no callback
instead (jaxlib 0.10.2 has one, which crashes when it is called).
"""

from __future__ import annotations

import ctypes
import signal


def delay_aborts() -> None:
    """Let each abort sleep for six seconds first, in its own thread: the handler of SIGABRT becomes C's `sleep`, whose argument, the number
    of seconds, is the number of the signal. Then the abort goes on. `sleep` may be called in a handler; Python code may not."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
