"""Whether JAX has started, and what must be settled before it does: CPU devices and the size of its thread pool.

The size of XLA's CPU thread pool decides how some contractions are cut, and so changes bits. It is a function of R here,
never of the machine, and can only be chosen before JAX starts.
"""

from __future__ import annotations

import os
import warnings

import jax
from jax._src import xla_bridge  # checked with jax 0.10.2: the only way to ask without starting JAX

SMALLEST_POOL = 8
OURS = "UNISONO_PJRT_NPROC"
"""The environment variable that remembers which PJRT_NPROC a strategy has set."""


def has_started() -> bool:
    """Whether JAX has made its devices; asking does not make them."""
    return xla_bridge.backends_are_initialized()


def make_cpu_devices(count: int) -> None:
    """Has JAX, not yet started, make at least `count` CPU devices; harmless where it finds a GPU or TPU."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user has said how many
    if cpu_devices_asked_for() < count:
        jax.config.update("jax_num_cpu_devices", count)


def cpu_devices_asked_for() -> int:
    """-1 where nothing was said and JAX makes one."""
    return jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]


def pool_for(replicas: int) -> int:
    """The number of threads that runs of R replicas use on CPU, on every machine."""
    return max(SMALLEST_POOL, 1 << (replicas - 1).bit_length())


def pool_now() -> int:
    """The number of threads that JAX has, or would have if it started now."""
    threads = int(os.environ.get("PJRT_NPROC") or os.cpu_count() or 1)
    devices = jax.local_device_count("cpu") if has_started() else cpu_devices_asked_for()
    return max(threads, devices)


def choose_pool(replicas: int) -> None:
    """Gives JAX, not yet started, the thread pool of a run of R replicas; what the user has set stays."""
    inherited = os.environ.get(OURS)  # a strategy of the process that started this one set it
    if os.environ.get("PJRT_NPROC") in (None, inherited):
        os.environ["PJRT_NPROC"] = os.environ[OURS] = str(pool_for(replicas))


def check_pool(replicas: int) -> None:
    """Says so where JAX runs with another thread pool than a run of R replicas has."""
    have, wanted = pool_now(), pool_for(replicas)
    if have != wanted and jax.default_backend() == "cpu":
        warnings.warn(
            f"JAX runs with {have} CPU threads here, and runs of {replicas} replicas use {wanted}: results may differ in "
            f"their last bits from the same run elsewhere. Make the strategy before anything starts JAX (an optimizer "
            f"does), and start Python with PJRT_NPROC={wanted} or without it.",
            stacklevel=3,
        )
