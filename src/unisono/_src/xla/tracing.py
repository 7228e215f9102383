"""Questions to JAX about the trace that is under way."""

from __future__ import annotations

import jax
from jax._src import core  # checked with jax 0.10.2


def get_trace_state() -> object:
    """Return an object that is equal on two lines if JAX traces both as parts of the same function."""
    return core.get_opaque_trace_state(convention="nnx")


def is_jit_disabled() -> bool:
    """Return whether the user has switched compilation off, by `jax.disable_jit` or by JAX_DISABLE_JIT."""
    return bool(jax.config.jax_disable_jit)  # pyright: ignore[reportAttributeAccessIssue]
