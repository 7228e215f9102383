"""What JAX traces."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core  # checked with jax 0.10.2


def state() -> Any:
    """Equal on two lines that JAX traces as parts of the same function."""
    return core.get_opaque_trace_state(convention="nnx")


def is_disabled() -> bool:
    """Return whether the user wants nothing to be compiled: inside of `jax.disable_jit`, or by JAX_DISABLE_JIT."""
    return bool(jax.config.jax_disable_jit)  # pyright: ignore[reportAttributeAccessIssue]
