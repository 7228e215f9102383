"""Whether a loss makes something of rows together that R replicas, each with its own rows, make otherwise.

A loss over all pairs of a batch has fewer pairs in a replica; the root of a mean is not the mean of roots.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.replica.compared_values import compared_values
from unisono._src.replica.marks import marked

ROWS = 8
MOST = 1 << 24
"""Elements of a batch that is drawn to try this."""
CLOSE = 1e-5
"""Rounding, where the values of rows may lie as close as those of a saturated function."""
CLOSE_IN_HALF = 1e-2
"""Where an argument has half precision."""


def couples_rows(function: Callable[..., Any], batch: tuple[Any, ...]) -> bool:
    """Return whether what `function` makes of some rows is not made of what it makes of their halves: their values one behind the other, or,
    of one number for all rows, the mean or the sum.

    `batch` says what shapes and dtypes its arguments have. Values are drawn; a function that cannot do with them, or that draws, is not known
    to couple anything.
    """
    shapes = jax.tree.leaves(batch)
    if sum(np.prod(a.shape[1:], dtype=int) for a in shapes) * ROWS > MOST:
        return False
    compared = compared_by(function, batch)
    return any(is_coupled(function, rows) for rows in drawn_rows(batch, compared))


def compared_by(function: Callable[..., Any], batch: tuple[Any, ...]) -> dict[int, set[float]]:
    """Return with which numbers the function compares its arrays, by their places; nothing of one that cannot be traced."""
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct((ROWS, *a.shape[1:]) if a.shape else (), a.dtype), batch)
    try:
        return compared_values(jax.make_jaxpr(function)(*like), range(len(jax.tree.leaves(batch))))
    except Exception:  # the user's code, which need not be one that can be traced
        return {}


def drawn_rows(batch: tuple[Any, ...], compared: Mapping[int, set[float]]) -> Iterator[list[Any]]:
    """Return rows whose targets, the first of the arrays, are numbers, and bits; and with what marks rows that do not count."""
    for targets in ("numbers", "bits"):
        rng = np.random.default_rng(0)
        kinds = [targets, *["numbers"] * (len(batch) - 1)]
        rows = [jax.tree.map(lambda a, k=kind, r=rng: drawn(r, a, k), of) for kind, of in zip(kinds, batch, strict=True)]
        yield rows
        leaves, structure = jax.tree.flatten(rows)
        for arrays in marked(rng, leaves, compared):
            yield jax.tree.unflatten(structure, arrays)


def is_coupled(function: Callable[..., Any], whole: list[Any]) -> bool:
    """Try it on these rows and on their halves."""
    half = ROWS // 2
    try:
        with jax.ensure_compile_time_eval():
            all_ = jax.tree.map(jnp.asarray, whole)
            parts = [
                jax.tree.map(lambda a, r=rows: jnp.asarray(a[r] if a.ndim else a), whole)
                for rows in (slice(half), slice(half, None))
            ]
            value, again, first, second = (np.asarray(function(*rows)) for rows in (all_, all_, *parts))
    except Exception:  # the user's code, on values that are not its own
        return False
    close = close_of(jax.tree.leaves(whole))
    if not is_close(value, again, close) or not np.all(np.isfinite(value)):
        return False
    if not (np.all(np.isfinite(first)) and np.all(np.isfinite(second))):
        return True  # as a mean over nothing
    together = [first + second, (first + second) / 2] if value.shape == first.shape else [np.concatenate([first, second])]
    return not any(is_close(value, of, close) for of in together)


def close_of(arrays: Iterable[Any]) -> float:
    """Return how close values made of these arrays are, whatever rows they are computed with."""
    halves = (jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < 4 for a in arrays)
    return CLOSE_IN_HALF if any(halves) else CLOSE


def is_close(a: np.ndarray, b: np.ndarray, close: float = CLOSE) -> bool:
    if a.shape != b.shape or not np.all(np.isfinite(b)):
        return False
    return bool(np.allclose(a, b, rtol=close, atol=close * float(np.max(np.abs(b), initial=0))))


def drawn(rng: np.random.Generator, like: Any, kind: str = "numbers", rows: int = ROWS) -> np.ndarray:
    """Return rows like these, of which the second half is of another make: whole numbers are a class of any two, others may be probabilities."""
    if not like.shape:
        return np.asarray(rng.uniform(0.1, 0.9)).astype(like.dtype)
    shape, dtype = (rows // 2, *like.shape[1:]), np.dtype(like.dtype)
    if dtype.kind in "iub" or kind == "bits":
        halves = [rng.random(shape) < share for share in (0.25, 0.75)]
    else:
        halves = [rng.uniform(0.1, 0.9, shape), rng.uniform(0.4, 0.6, shape)]
    return np.concatenate(halves).astype(dtype)


def warn_of_coupling(what: str) -> None:
    warnings.warn(
        f"{what} makes of all rows together what is not made of their parts. Each replica has its own rows alone, so that R replicas "
        f"have another loss than the whole batch, as with batch normalization. If it is to see the whole batch, write replicas=1.",
        stacklevel=2,
    )
