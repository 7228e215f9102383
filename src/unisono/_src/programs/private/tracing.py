"""The current trace, and what traces write into programs."""

from __future__ import annotations

import contextlib

from jax._src import config, core

from unisono._src.typed_jax import settings


def get_trace_state() -> object:
    """Get a mark of the current trace. Two lines have equal marks if JAX traces both as parts of the same function."""
    return core.get_opaque_trace_state(convention="nnx")


def is_jit_disabled() -> bool:
    """Whether the user has switched compilation off. `jax.disable_jit` does, and JAX_DISABLE_JIT."""
    return bool(settings.jax_disable_jit)


def omit_source_lines() -> contextlib.AbstractContextManager[None]:
    """Open a context in which programs hold no source paths. It holds for programs that this thread traces."""
    return config.traceback_in_locations_limit(0)
