"""Marks: numbers by which code tells rows that count from those that do not, as -1, -100 and NaN."""

from __future__ import annotations

import numpy as np

MARKED = 0.7, 0.3
"""Which share of the elements is marked in the first half of the rows, and in the second."""


def with_marks(rng: np.random.Generator, array: np.ndarray, marks: list[float]) -> np.ndarray:
    """Return the array with marks in some places, most of them in its first half."""
    values = np.array(array)
    marks = [mark for mark in marks if fits(mark, values.dtype)]
    if not marks or not values.size:
        return values
    half = len(values) // 2
    chosen = np.asarray(marks)[rng.integers(len(marks), size=values.shape)].astype(values.dtype)
    shares = np.where(np.arange(len(values)) < half, *MARKED).reshape(-1, *[1] * (values.ndim - 1))
    return np.where(rng.random(values.shape) < shares, chosen, values)


def fits(mark: float, dtype: np.dtype) -> bool:
    """Return whether an array of this dtype can hold the number."""
    if dtype.kind == "f":
        return True
    if dtype.kind == "b" or not float(mark).is_integer():
        return dtype.kind == "b" and mark in (0, 1)
    return bool(np.iinfo(dtype).min <= mark <= np.iinfo(dtype).max)
