"""Weights whose gradient takes their place (`overwrite_with_gradient`): the scales of float8 and their histories of largest values.

Such a gradient is no sum. Replicas hand on each their own, and the largest is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def spread(weights: Sequence[Any], gradients: Sequence[Any], replica: Any, replicas: int) -> list[Any]:
    """Return the gradients in a form that can be added over replicas: those that overwrite have a row for each replica."""

    def in_its_row(gradient: Any) -> Any:
        own = (jnp.arange(replicas) == replica).reshape(-1, *[1] * gradient.ndim)
        return jnp.where(own, gradient, jnp.zeros_like(gradient))

    return [in_its_row(g) if overwrites(v) and replicas > 1 else g for v, g in zip(weights, gradients, strict=True)]


def largest(weights: Sequence[Any], totals: Sequence[Any], present: Any, replicas: int) -> list[Any]:
    """Return the totals of `spread`, with the largest over the replicas that have rows, which are the first `present`."""

    def of_all(total: Any) -> Any:
        has_rows = (jnp.arange(replicas) < present).reshape(-1, *[1] * (total.ndim - 1))
        return jnp.max(jnp.where(has_rows, total, -jnp.inf), axis=0)

    return [of_all(t) if overwrites(v) and replicas > 1 and t is not None else t for v, t in zip(weights, totals, strict=True)]


def overwrites(variable: Any) -> bool:
    return variable.overwrite_with_gradient
