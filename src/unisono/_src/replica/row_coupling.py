"""Losses that couple rows: R replicas, each with its own rows, get another value than the whole batch.

A loss over all pairs of a batch has fewer pairs in a replica. The root of a mean is not the mean of roots.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.replica.compared_values import find_compared_values
from unisono._src.replica.marks import mark_rows
from unisono._src.typing import PyTree, Shape, UserFunction

ROWS = 8
MOST_ELEMENTS = 1 << 24
"""The largest number of elements of a batch that is drawn to try a function."""
CLOSE = 1e-5
"""The tolerance for rounding. It is small, since rows of a saturated function have nearly the same values."""
CLOSE_IN_HALF = 1e-2
"""The tolerance where an argument has half precision."""


class ShapedValue(Protocol):
    """A value with a shape and a dtype: an array, a tracer, or the description of one."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype: ...


def couples_rows(function: UserFunction, batch: tuple[PyTree, ...]) -> bool:
    """Return whether the value of `function` on some rows does not follow from its values on their halves, by concatenation or, of one number
    for all rows, by the mean or the sum.

    `batch` gives the shapes and dtypes of the arguments; their values are drawn. The answer is False for a function that fails on drawn values
    or draws numbers itself.
    """
    shapes = jax.tree.leaves(batch)
    if sum(np.prod(array.shape[1:], dtype=int) for array in shapes) * ROWS > MOST_ELEMENTS:
        return False
    compared = find_compared(function, batch)
    return any(has_coupling(function, rows) for rows in draw_batches(batch, compared))


def find_compared(function: UserFunction, batch: tuple[PyTree, ...]) -> dict[int, set[float]]:
    """Return the numbers that the function compares its arrays with, by the arrays' positions; an empty dict if it cannot be traced."""
    like = jax.tree.map(lambda array: jax.ShapeDtypeStruct((ROWS, *array.shape[1:]) if array.shape else (), array.dtype), batch)
    try:
        return find_compared_values(jax.make_jaxpr(function)(*like), range(len(jax.tree.leaves(batch))))
    except Exception:  # the user's code need not be traceable
        return {}


def draw_batches(batch: tuple[PyTree, ...], compared: Mapping[int, set[float]]) -> Iterator[list[PyTree]]:
    """Yield rows whose targets, the first argument, are numbers, then bits; each also with marks of rows that do not count."""
    for targets in ("numbers", "bits"):
        rng = np.random.default_rng(0)
        kinds = [targets, *["numbers"] * (len(batch) - 1)]
        rows = [
            jax.tree.map(lambda array, kind=kind, rng=rng: draw_rows_like(rng, array, kind), argument)
            for kind, argument in zip(kinds, batch, strict=True)
        ]
        yield rows
        leaves, structure = jax.tree.flatten(rows)
        for arrays in mark_rows(rng, leaves, compared):
            yield jax.tree.unflatten(structure, arrays)


def has_coupling(function: UserFunction, whole: list[PyTree]) -> bool:
    """Return whether the value of the function on these rows does not follow from its values on their halves."""
    half = ROWS // 2
    try:
        with jax.ensure_compile_time_eval():
            all_rows = jax.tree.map(jnp.asarray, whole)
            parts = [
                jax.tree.map(lambda array, rows=rows: jnp.asarray(array[rows] if array.ndim else array), whole)
                for rows in (slice(half), slice(half, None))
            ]
            value, again, first, second = (np.asarray(function(*rows)) for rows in (all_rows, all_rows, *parts))
    except Exception:  # the user's code, on values that it was not written for
        return False
    tolerance = choose_tolerance(jax.tree.leaves(whole))
    if not are_values_close(value, again, tolerance) or not np.all(np.isfinite(value)):
        return False
    if not (np.all(np.isfinite(first)) and np.all(np.isfinite(second))):
        return True  # for example, a mean over nothing
    together = [first + second, (first + second) / 2] if value.shape == first.shape else [np.concatenate([first, second])]
    return not any(are_values_close(value, merged, tolerance) for merged in together)


def choose_tolerance(arrays: Iterable[ShapedValue]) -> float:
    """Return the tolerance for values that are computed from these arrays."""
    halves = (jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4 for array in arrays)
    return CLOSE_IN_HALF if any(halves) else CLOSE


def are_values_close(value: np.ndarray, expected: np.ndarray, tolerance: float = CLOSE) -> bool:
    if value.shape != expected.shape or not np.all(np.isfinite(expected)):
        return False
    return bool(np.allclose(value, expected, rtol=tolerance, atol=tolerance * float(np.max(np.abs(expected), initial=0))))


def draw_rows_like(rng: np.random.Generator, like: ShapedValue, kind: str = "numbers", rows: int = ROWS) -> np.ndarray:
    """Return rows of this dtype. The second half has another distribution. Whole numbers are 0 or 1, others may be probabilities."""
    if not like.shape:
        return np.asarray(rng.uniform(0.1, 0.9)).astype(like.dtype)
    shape = (rows // 2, *like.shape[1:])
    dtype = np.dtype(like.dtype)
    if dtype.kind in "iub" or kind == "bits":
        halves = [rng.random(shape) < fraction for fraction in (0.25, 0.75)]
    else:
        halves = [rng.uniform(0.1, 0.9, shape), rng.uniform(0.4, 0.6, shape)]
    return np.concatenate(halves).astype(dtype)


def warn_of_coupling(what: str) -> None:
    warnings.warn(
        f"{what} makes of all rows together what is not made of their parts. Each replica has its own rows alone, so that R replicas "
        f"have another loss than the whole batch, as with batch normalization. If it is to see the whole batch, write replicas=1.",
        stacklevel=2,
    )
