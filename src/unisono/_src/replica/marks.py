"""Marks: numbers by which code tells rows that count from those that do not, as -1, -100 and NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

MOST = 8
"""Marks that are tried."""

MARKED = 0.7, 0.3
"""Which share of the elements is marked in the first half of the rows, and in the second."""


def marked(
    rng: np.random.Generator, arrays: Sequence[np.ndarray], compared: Mapping[int, set[float]]
) -> Iterator[list[np.ndarray]]:
    """Return the arrays with marks in some places, most of them in the first half of the rows: once for each mark that they can hold.

    `compared` says with which numbers code compares the arrays, by their places.
    """
    marks = [[mark for mark in sorted(compared.get(place, ())) if fits(mark, array.dtype)] for place, array in enumerate(arrays)]
    for number in range(min(MOST, max(map(len, marks), default=0))):
        yield [with_mark(rng, a, of[number % len(of)]) if of else a for a, of in zip(arrays, marks, strict=True)]


def with_mark(rng: np.random.Generator, array: np.ndarray, mark: float) -> np.ndarray:
    """Return the array with the mark in some places."""
    if not array.ndim:
        return array
    half = len(array) // 2
    shares = np.where(np.arange(len(array)) < half, *MARKED).reshape(-1, *[1] * (array.ndim - 1))
    return np.where(rng.random(array.shape) < shares, np.asarray(mark, array.dtype), array)


def fits(mark: float, dtype: np.dtype) -> bool:
    """Return whether an array of this dtype can hold the number."""
    if jnp.issubdtype(dtype, jnp.floating):
        return not np.isfinite(mark) or abs(mark) <= float(jnp.finfo(dtype).max)
    if dtype.kind == "b":
        return mark in (0, 1)
    return dtype.kind in "iu" and float(mark).is_integer() and np.iinfo(dtype).min <= mark <= np.iinfo(dtype).max
