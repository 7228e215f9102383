"""Random values in the place of real ones, to measure functions on: like the values of an array, or like a shape and a dtype alone."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from unisono._src.typing import AnyArray

MOST = 2**62
"""The largest whole number that is drawn."""


ShapedValue: TypeAlias = AnyArray | jax.ShapeDtypeStruct | ShapedArray
"""A value with a shape and a dtype."""


def draw_values_like(rng: np.random.Generator, array: AnyArray) -> np.ndarray:
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
        high = max(high, low + 1)
    return draw_between(rng, values, low, high, is_whole, 0 <= low < high <= 1, 2 * (finite.std() or 1))


def draw_fed_values_like(rng: np.random.Generator, array: AnyArray, zeros_as: str) -> np.ndarray:
    """Return random values in place of what a metric was fed with: whole numbers for whole numbers, probabilities for probabilities, weights
    for weights. All ranges include 0 and, where they have no negative numbers, 1.

    `zeros_as` is the kind of values to draw in place of zeros alone: "numbers" or "bits".
    """
    like = np.asarray(array)
    values = like.astype("float64")
    if not (values.size and np.all(np.isfinite(values))):
        return like
    low = values.min(initial=0)
    high = values.max(initial=0)
    is_whole = bool(np.all(values == np.round(values)))
    if low == high and like.dtype.kind not in "iub":
        is_whole = zeros_as == "bits"
    return draw_between(rng, like, low, max(high, 1), is_whole, low >= 0, values.std() or 1)


def draw_between(
    rng: np.random.Generator, like: np.ndarray, low: float, high: float, is_whole: bool, is_bounded: bool, spread: float
) -> np.ndarray:
    """Return random values in place of these: of a range where they are whole or bounded, else the values plus noise of this spread."""
    values = like.astype("float64")
    if is_whole:
        drawn = rng.integers(int(max(low, -MOST)), int(min(high, MOST)) + 1, like.shape)
    elif is_bounded:
        drawn = rng.uniform(low, high, like.shape)
        if like.ndim > 1 and np.allclose(values.sum(-1), 1, atol=1e-3):
            drawn /= drawn.sum(-1, keepdims=True)
    else:
        drawn = np.where(np.isfinite(values), values, 0) + spread * rng.standard_normal(like.shape)
    with np.errstate(over="ignore"):
        return drawn.astype(like.dtype)


def draw_rows_like(rng: np.random.Generator, like: ShapedValue, rows: int, kind: str = "numbers") -> np.ndarray:
    """Return rows of this dtype. The second half has another distribution, and no mean, median or rank of its rows is that of all. Whole
    numbers are 0 or 1, others may be probabilities."""
    if not like.shape:
        return np.asarray(rng.uniform(0.1, 0.9)).astype(like.dtype)
    shape = (rows // 2, *like.shape[1:])
    dtype = np.dtype(like.dtype)
    if dtype.kind in "iub" or kind == "bits":
        halves = [rng.random(shape) < fraction for fraction in (0.25, 0.75)]
    else:
        halves = [rng.uniform(0.1, 0.5, shape), rng.uniform(0.6, 0.9, shape)]
    return np.concatenate(halves).astype(dtype)
