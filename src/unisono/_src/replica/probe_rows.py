"""Made-up rows and weights for a probe. The first batch of a training may tell nothing: all zero, all alike, nothing masked, every weight one.

A sum over rows is a sum whatever the rows hold, and so is a mean. So rows may be made up, as long as the code accepts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.keras_private.data_adapters import unpack_batch
from unisono._src.replica import random_keys
from unisono._src.replica.marks import mark_rows
from unisono._src.replica.protocol import State
from unisono._src.typing import AnyArray, Array, PyTree, UserBatch

MOST = 2**62
"""The largest whole number that is drawn."""


def make_up_rows(batch: UserBatch, compared: Mapping[int, set[float]]) -> list[UserBatch]:
    """Return made-up batches with as many rows as `batch`, to measure on as well.

    `compared` holds the numbers that code compares the arrays of the batch with, by the arrays' positions among its leaves.
    """
    rng = np.random.default_rng(0)
    arrays, structure = jax.tree.flatten(batch)
    leaves = [np.asarray(array) for array in arrays]
    drawn = [draw_values_like(rng, leaf) for leaf in leaves]
    made = [drawn, *mark_rows(rng, leaves, compared), *mark_rows(rng, drawn, compared)]
    return [jax.tree.unflatten(structure, made_leaves) for made_leaves in made]


def draw_values_like(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """Return random values in place of these: whole numbers of the same range for whole numbers, probabilities for probabilities, else any."""
    values = np.asarray(array)
    is_float = bool(jnp.issubdtype(values.dtype, jnp.floating))
    if values.dtype.kind == "b":
        return rng.random(values.shape) < 0.5
    exact = values.astype("float64") if is_float or values.dtype.kind in "iu" else np.zeros(0)
    finite = exact[np.isfinite(exact)]
    if not finite.size:
        return values
    low = float(finite.min())
    high = float(finite.max())
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


def draw_sample_weights(batch: UserBatch) -> list[tuple[PyTree, PyTree, PyTree]]:
    """Return a batch of `fit` with random sample weights, some of them zero; an empty list where the batch has no weights."""
    rng = np.random.default_rng(0)
    x, y, weights = unpack_batch(batch)
    if weights is None:
        return []

    def drawn(array: AnyArray) -> np.ndarray:
        shape = np.shape(array)
        return (rng.uniform(0.1, 2, shape) * (rng.random(shape) < 0.7)).astype(np.asarray(array).dtype)

    return [(x, y, jax.tree.map(drawn, weights))]


def perturb_weights(state: State) -> State:
    """Return the state with weights and other numbers that a model does not begin with: none of them is zero."""
    rng = np.random.default_rng(0)

    def moved(value: Array) -> Array:
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        return value + jnp.asarray(np.abs(rng.normal(0, 0.1, value.shape)), value.dtype) if is_float else value

    def shaken(value: Array) -> Array:
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        return value + jnp.asarray(rng.normal(0, 0.1, value.shape), value.dtype) if is_float else value

    weights, non_trainable, *rest = state
    return [shaken(value) for value in weights], [moved(value) for value in non_trainable], *rest


def change_seeds(state: State, variables: Sequence[keras.Variable]) -> State:
    """Return the state with other seeds. `variables` are the non-trainable variables."""
    weights, non_trainable, *rest = state
    moved = [
        value + 1 if random_keys.is_seed_state(variable) else value
        for variable, value in zip(variables, non_trainable, strict=True)
    ]
    return weights, moved, *rest
