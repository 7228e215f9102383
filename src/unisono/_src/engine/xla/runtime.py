"""The start of JAX, and settings that come before it.

These are the number of CPU devices, and at least two threads in the thread pool.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType

import jax
import scipy.linalg  # noqa: F401  # JAX imports it when it is first needed, and its LAPACK must be there before
from threadpoolctl import ThreadpoolController

from unisono._src.programs.private.backends import has_jax_started
from unisono._src.typed_jax import settings

FEWEST_THREADS = 2

NUMPY_LIBRARIES = "numpy.libs"
"""The folder of the library in NumPy's wheels. JAX does not call this library, which therefore keeps its threads."""


def make_cpu_devices(count: int) -> None:
    """Set JAX to make at least `count` CPU devices. JAX must not have started. This is harmless where JAX finds a GPU or TPU."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user has set the number
    if count_requested_cpu_devices() < count:
        jax.config.update("jax_num_cpu_devices", count)


def count_requested_cpu_devices() -> int:
    """The number of CPU devices in JAX's settings. It is -1 if it is not set: then JAX makes one."""
    return settings.jax_num_cpu_devices


def count_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_threads() -> int:
    """Count the CPU threads that JAX has, or would have now."""
    requested = int(os.environ.get("PJRT_NPROC") or count_cores())
    devices = jax.local_device_count("cpu") if has_jax_started() else count_requested_cpu_devices()
    return max(requested, devices)


def set_fewest_threads() -> None:
    """Set JAX to two threads where it would have one. JAX must not have started. A setting of the user stays."""
    if "PJRT_NPROC" not in os.environ and count_threads() < FEWEST_THREADS:
        os.environ["PJRT_NPROC"] = str(FEWEST_THREADS)


def check_threads() -> None:
    """Warn if JAX runs with a single CPU thread."""
    if jax.default_backend() == "cpu" and count_threads() < FEWEST_THREADS:
        warnings.warn(
            f"JAX runs with one CPU thread here, and then makes other code: results may differ in their last bits from those with "
            f"{FEWEST_THREADS} threads or more, which are all the same. Make the strategy before anything starts JAX (an optimizer "
            f"does), and start Python with PJRT_NPROC={FEWEST_THREADS} or without it.",
            stacklevel=4,
        )


@functools.cache
def use_one_thread() -> None:
    """Limit LAPACK to one thread until the process ends. A program may run at any time.

    Programs on CPU call the LAPACK of SciPy for decompositions and for solutions of equations, and so does `keras.initializers.Orthogonal`.
    This LAPACK has one thread for each core, and the number of threads changes bits.
    """
    controller = ThreadpoolController()
    libraries = [library["filepath"] for library in controller.info() if library["user_api"] == "blas"]
    controller.select(filepath=[path for path in libraries if NUMPY_LIBRARIES not in path]).limit(limits=1)


class Interrupts:
    """SIGINT of one thread, delayed inside `with interrupts:` blocks. It takes effect at the end of the block."""

    def __init__(self) -> None:
        self._is_of_python = signal.getsignal(signal.SIGINT) is not None
        """Whether it can be put back."""
        self._is_delayed = False
        self._waiting: tuple[int, FrameType | None] | None = None
        self._handler: Callable[[int, FrameType | None], object] = signal.default_int_handler

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Take over SIGINT for calls that open such blocks.

        To do so for each block is a sixth of what Python does for a small step.
        """
        if not self._is_of_python or threading.current_thread() is not threading.main_thread():
            yield
            return
        handler = signal.signal(signal.SIGINT, self._receive)
        if callable(handler):
            self._handler = handler
        else:  # it is ignored
            signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            newest = signal.signal(signal.SIGINT, handler)
            if newest != self._receive:  # the user's code has set another one
                signal.signal(signal.SIGINT, newest)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_delayed:
            self._waiting = number, frame
        else:
            self._handler(number, frame)

    def __enter__(self) -> None:
        self._is_delayed = True

    def __exit__(self, *_: object) -> None:
        self._is_delayed = False
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._receive(*waiting)
