"""Which function JAX is tracing."""

from __future__ import annotations

from typing import Any

from jax._src import core  # checked with jax 0.10.2


def state() -> Any:
    """Equal on two lines that JAX traces as parts of the same function."""
    return core.get_opaque_trace_state(convention="nnx")
