"""Whether JAX has started, and what must be settled before it does: CPU devices, and that its thread pool has two threads.

How many threads there are changes no bit (see `determinism`, `lapack`, and of `rewrite` `contraction`, `reduction` and `fourier`), with one
exception: for a single one, XLA makes other code of some expressions.
"""

from __future__ import annotations

import os
import warnings

import jax
from jax._src import xla_bridge  # checked with jax 0.10.2: the only way to ask without starting JAX

FEWEST_THREADS = 2


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


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads() -> int:
    """The number of threads that JAX has on CPU, or would have if it started now."""
    asked_for = int(os.environ.get("PJRT_NPROC") or cores())
    devices = jax.local_device_count("cpu") if has_started() else cpu_devices_asked_for()
    return max(asked_for, devices)


def ask_for_threads() -> None:
    """Gives JAX, not yet started, two threads where it would have one; what the user has set stays."""
    if "PJRT_NPROC" not in os.environ and threads() < FEWEST_THREADS:
        os.environ["PJRT_NPROC"] = str(FEWEST_THREADS)


def check_threads() -> None:
    """Says so where JAX runs with a single one."""
    if jax.default_backend() == "cpu" and threads() < FEWEST_THREADS:
        warnings.warn(
            f"JAX runs with one CPU thread here, and then makes other code: results may differ in their last bits from those with "
            f"{FEWEST_THREADS} threads or more, which are all the same. Make the strategy before anything starts JAX (an optimizer "
            f"does), and start Python with PJRT_NPROC={FEWEST_THREADS} or without it.",
            stacklevel=4,
        )
