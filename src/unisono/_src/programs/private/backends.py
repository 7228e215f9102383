"""The start of JAX, and a second CPU backend."""

from __future__ import annotations

import functools
import os

import jax
from jax._src import xla_bridge
from jaxlib import xla_client

THREADS_VARIABLE = "PJRT_NPROC"
"""The environment variable for a CPU backend's number of threads."""


def has_jax_started() -> bool:
    """Whether JAX has made its devices. Asking does not make them."""
    return xla_bridge.backends_are_initialized()


@functools.cache
def make_cpu_device(threads: int) -> jax.Device:
    """Make a CPU device that JAX does not list. Its backend has this number of threads."""
    before = os.environ.get(THREADS_VARIABLE)
    os.environ[THREADS_VARIABLE] = str(threads)
    try:
        return xla_client.make_cpu_client(num_devices=1).devices()[0]
    finally:
        if before is None:
            del os.environ[THREADS_VARIABLE]
        else:
            os.environ[THREADS_VARIABLE] = before
