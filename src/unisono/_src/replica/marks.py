"""Marks: sentinel numbers as -1, -100 and NaN, by which code tells rows that count from rows that do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

MOST_MARKS = 8
"""The largest number of marks that are tried."""

MARKED_FRACTIONS = 0.7, 0.3
"""The fraction of the elements that is marked in the first half of the rows, and in the second."""


def mark_rows(
    rng: np.random.Generator, arrays: Sequence[np.ndarray], compared: Mapping[int, set[float]]
) -> Iterator[list[np.ndarray]]:
    """Yield the arrays with marks in some places, most of them in the first half of the rows: once for each mark that they can hold.

    `compared` holds the numbers that code compares the arrays with, by the arrays' positions.
    """
    marks = [
        [mark for mark in sorted(compared.get(place, ())) if can_hold(mark, array.dtype)] for place, array in enumerate(arrays)
    ]
    for number in range(min(MOST_MARKS, max(map(len, marks), default=0))):
        yield [
            place_mark(rng, values, own_marks[number % len(own_marks)]) if own_marks else values
            for values, own_marks in zip(arrays, marks, strict=True)
        ]


def place_mark(rng: np.random.Generator, array: np.ndarray, mark: float) -> np.ndarray:
    """Return the array with the mark in some places."""
    if not array.ndim:
        return array
    half = len(array) // 2
    fractions = np.where(np.arange(len(array)) < half, *MARKED_FRACTIONS).reshape(-1, *[1] * (array.ndim - 1))
    return np.where(rng.random(array.shape) < fractions, np.asarray(mark, array.dtype), array)


def can_hold(mark: float, dtype: np.dtype) -> bool:
    """Return whether an array of this dtype can hold the number."""
    if jnp.issubdtype(dtype, jnp.floating):
        return not np.isfinite(mark) or abs(mark) <= float(jnp.finfo(dtype).max)
    if dtype.kind == "b":
        return mark in (0, 1)
    return dtype.kind in "iu" and float(mark).is_integer() and np.iinfo(dtype).min <= mark <= np.iinfo(dtype).max
