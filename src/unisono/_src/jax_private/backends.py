"""The start of JAX."""

from __future__ import annotations

from jax._src import xla_bridge


def has_jax_started() -> bool:
    """Return whether JAX has made its devices. The question does not make them."""
    return xla_bridge.backends_are_initialized()
