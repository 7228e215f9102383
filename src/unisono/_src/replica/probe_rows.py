"""Other rows and weights to measure on, where those of a first batch may tell nothing: all zero, all alike, nothing masked, every weight one.

A number that is a sum over rows, or a mean over them, is one whatever the rows hold. So rows may be made up, as long as code can take them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src import keras_private
from unisono._src.replica import random_keys
from unisono._src.replica.marks import marked
from unisono._src.replica.protocol import State

MOST = 2**62
"""A whole number that can be drawn."""


def other_rows(batch: Any, compared: Mapping[int, set[float]]) -> list[Any]:
    """Return batches of as many rows as `batch`, to measure on beside it.

    `compared` says with which numbers code compares the arrays of the batch, by their places among its leaves.
    """
    rng = np.random.default_rng(0)
    arrays, structure = jax.tree.flatten(batch)
    leaves = [np.asarray(array) for array in arrays]
    drawn = [drawn_like(rng, leaf) for leaf in leaves]
    made = [drawn, *marked(rng, leaves, compared), *marked(rng, drawn, compared)]
    return [jax.tree.unflatten(structure, of_batch) for of_batch in made]


def drawn_like(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """Return values that could stand in the place of these: whole numbers among theirs for such, probabilities for such, else any."""
    values = np.asarray(array)
    is_float = bool(jnp.issubdtype(values.dtype, jnp.floating))
    if values.dtype.kind == "b":
        return rng.random(values.shape) < 0.5
    exact = values.astype("float64") if is_float or values.dtype.kind in "iu" else np.zeros(0)
    finite = exact[np.isfinite(exact)]
    if not finite.size:
        return values
    low, high = float(finite.min()), float(finite.max())
    is_whole = not is_float or (0 <= low < high and bool(np.all(finite == np.round(finite))))
    if is_whole:
        drawn = rng.integers(int(max(low, -MOST)), int(min(max(high, low + 1), MOST)) + 1, values.shape)
    elif 0 <= low < high <= 1:
        drawn = rng.uniform(low, high, values.shape)
        if values.ndim > 1 and np.allclose(exact.sum(-1), 1, atol=1e-3):
            drawn /= drawn.sum(-1, keepdims=True)
    else:
        drawn = np.where(np.isfinite(exact), exact, 0) + 2 * (finite.std() or 1) * rng.standard_normal(values.shape)
    with np.errstate(over="ignore"):
        return drawn.astype(values.dtype)


def with_drawn_weights(batch: Any) -> list[Any]:
    """Return a batch of `fit` with other sample weights, some of them zero; none where it has no weights."""
    rng = np.random.default_rng(0)
    x, y, weights = keras_private.unpack(batch)
    if weights is None:
        return []

    def drawn(array: Any) -> Any:
        shape = np.shape(array)
        return (rng.uniform(0.1, 2, shape) * (rng.random(shape) < 0.7)).astype(np.asarray(array).dtype)

    return [(x, y, jax.tree.map(drawn, weights))]


def with_other_weights(state: State) -> State:
    """Return the state with other weights, and other numbers beside them, than a model begins with: none of them zero."""
    rng = np.random.default_rng(0)

    def moved(value: Any) -> Any:
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        return value + jnp.asarray(np.abs(rng.normal(0, 0.1, value.shape)), value.dtype) if is_float else value

    def shaken(value: Any) -> Any:
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        return value + jnp.asarray(rng.normal(0, 0.1, value.shape), value.dtype) if is_float else value

    weights, others, *more = state
    return [shaken(value) for value in weights], [moved(value) for value in others], *more


def with_other_seeds(state: State, variables: list[Any]) -> State:
    """Return the state with other random numbers to come; `variables` are those that are not trained."""
    weights, others, *more = state
    moved = [value + 1 if random_keys.is_seed(v) else value for v, value in zip(variables, others, strict=True)]
    return weights, moved, *more
