"""The trace that is under way, and what traces write into programs."""

from __future__ import annotations

import contextlib

from jax._src import config, core

from unisono._src.typed_jax import settings


def get_trace_state() -> object:
    """Return an object that is equal on two lines if JAX traces both as parts of the same function."""
    return core.get_opaque_trace_state(convention="nnx")


def is_jit_disabled() -> bool:
    """Return whether the user has switched compilation off, by `jax.disable_jit` or by JAX_DISABLE_JIT."""
    return bool(settings.jax_disable_jit)


def omit_source_lines() -> contextlib.AbstractContextManager[None]:
    """Return a context in which programs, traced in this thread, hold no paths of source files."""
    return config.traceback_in_locations_limit(0)
