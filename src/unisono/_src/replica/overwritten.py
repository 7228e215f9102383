"""Weights whose gradient takes their place (`overwrite_with_gradient`): the scales of float8 and their histories of largest values.

Such a gradient is no sum. Replicas hand on each their own, and the largest is that of the whole batch: so Keras' optimizer merges those of
the steps that it accumulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def spread(weights: Sequence[Any], gradients: Sequence[Any], replica: Any, replicas: int) -> list[Any]:
    """Return the gradients in a form that can be added over replicas: those that overwrite have a row for each replica.

    In front of a row stands 1, so that the sum says which replicas there were.
    """

    def in_its_row(weight: Any, gradient: Any) -> Any:
        own = (jnp.arange(replicas) == replica)[:, None]
        row = jnp.concatenate([jnp.ones(1, gradient.dtype), jnp.ravel(gradient)[: size_of_row(weight)]])
        return jnp.where(own, row, jnp.zeros_like(row))

    return [in_its_row(v, g) if overwrites(v) and replicas > 1 else g for v, g in zip(weights, gradients, strict=True)]


def largest(weights: Sequence[Any], before: Sequence[Any], totals: Sequence[Any], replicas: int) -> list[Any]:
    """Return the totals of `spread`, with the largest over the replicas that have rows. `before` are the weights' values."""

    def of_all(weight: Any, old: Any, total: Any) -> Any:
        there, rows = total[:, :1] > 0, total[:, 1:]
        found = jnp.max(jnp.where(there, rows, -jnp.inf), axis=0)
        return jnp.roll(old, -1).at[0].set(found[0]) if is_history(weight) else found.reshape(old.shape)

    return [
        of_all(v, old, t) if overwrites(v) and replicas > 1 and t is not None else t
        for v, old, t in zip(weights, before, totals, strict=True)
    ]


def overwrites(variable: Any) -> bool:
    return variable.overwrite_with_gradient


def is_history(variable: Any) -> bool:
    """Return whether the weight holds the largest values of the steps before, as layers of float8 do: each step moves it on by one place and
    puts its own first. Only that one is handed on, in place of a thousand."""
    return overwrites(variable) and variable.name.endswith("_amax_history") and len(variable.shape) == 1


def size_of_row(variable: Any) -> int | None:
    """Return how much of the gradient replicas may differ in; None for all of it."""
    return 1 if is_history(variable) else None
