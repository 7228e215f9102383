"""Time for a last word.

Where process 0 is gone, JAX' client aborts the process within a tenth of a second, and says nothing of who is lost; it takes no
callback in its place (jaxlib 0.10.2 has one, which crashes when it is called).
"""

from __future__ import annotations

import ctypes
import signal

SECONDS = int(signal.SIGABRT)


def delay() -> None:
    """An abort sleeps for six seconds first, in its own thread: SIGABRT's handler is C's `sleep`, whose argument, the number of
    seconds, is the number of the signal. Then the abort goes on. `sleep` may be called in a handler, which Python's code may not."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
