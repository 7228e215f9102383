"""Weights whose gradient takes their place (`overwrite_with_gradient`): the scales of float8 and their histories of largest values.

Such a gradient is no sum. Each replica sends its own gradient, and the largest one is the gradient of the whole batch: Keras' optimizer
merges the gradients of accumulated steps in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import keras

from unisono._src.typing import Array


def widen_floats(gradients: Sequence[Array]) -> list[Array]:
    """Return gradients of floats as float32, in which they are added; all others as they are."""
    return [gradient.astype(jnp.float32) if jnp.issubdtype(gradient.dtype, jnp.floating) else gradient for gradient in gradients]


def spread_over_replicas(
    weights: Sequence[keras.Variable], gradients: Sequence[Array], replica: Array, replicas: int
) -> list[Array]:
    """Return the gradients in a form that can be added over replicas: an overwriting gradient gets a row for each replica.

    Each row begins with a 1, so that the sum tells which replicas took part.
    """

    def put_into_row(weight: keras.Variable, gradient: Array) -> Array:
        is_row_of_replica = (jnp.arange(replicas) == replica)[:, None]
        row = jnp.concatenate([jnp.ones(1, gradient.dtype), jnp.ravel(gradient)[: 1 if is_history(weight) else None]])
        return jnp.where(is_row_of_replica, row, jnp.zeros_like(row))

    return [
        put_into_row(weight, gradient) if is_overwritten_by_gradient(weight) and replicas > 1 else gradient
        for weight, gradient in zip(weights, gradients, strict=True)
    ]


def take_largest_gradients(
    weights: Sequence[keras.Variable], before: Sequence[Array], totals: Sequence[Array | None], replicas: int
) -> list[Array | None]:
    """Return the totals of `spread_over_replicas`, with the largest values over the replicas that have rows. `before` are the weights' values."""

    def take_largest(weight: keras.Variable, old: Array, total: Array) -> Array:
        has_rows = total[:, :1] > 0
        rows = total[:, 1:]
        largest_values = jnp.max(jnp.where(has_rows, rows, -jnp.inf), axis=0)
        if is_history(weight):
            return jnp.roll(old, -1).at[0].set(largest_values[0])
        return largest_values.reshape(old.shape)

    return [
        take_largest(weight, old, total) if is_overwritten_by_gradient(weight) and replicas > 1 and total is not None else total
        for weight, old, total in zip(weights, before, totals, strict=True)
    ]


def is_overwritten_by_gradient(variable: keras.Variable) -> bool:
    return variable.overwrite_with_gradient


def is_history(variable: keras.Variable) -> bool:
    """Return whether the weight is a history of the largest values of earlier steps, as layers of float8 keep one. Each step moves the
    history by one place and puts its own value first. Replicas send that value alone, in place of a thousand."""
    return is_overwritten_by_gradient(variable) and variable.name.endswith("_amax_history") and len(variable.shape) == 1
