"""Sums in forms that are fast, and whose order of additions is ours.

By default XLA:CPU gives long sums to YNNPACK, which cuts them by the number of threads, so that their bits depend on it. Programs of ours are
compiled without that (`determinism.compiler_options`), and XLA's own loops add up one result after the other: over columns ten times slower.
So a long sum becomes additions of whole blocks, up to sixteen in one expression, again and again, until little is left. What is left, and a sum of
some hundred elements, is made in two steps. How it is cut, shapes alone decide. Largest and smallest elements go the same way.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import JaxprEqn

from unisono._src.xla.rewrite.equations import MadeBy, Replacement, shape

LEAST = 1 << 13
"""Elements from which on a reduction is taken in stages."""

MANY = 1 << 8
"""Elements of one result from which on it is made in two steps. XLA adds up rows of several dimensions one after another: that is two to
four times as slow, and the sums are ten times less exact."""

AT_ONCE = 16
"""Blocks in one expression."""

SHORT = 1 << 12
"""Neighbours in memory that are left to a loop of XLA's: it is fused with what makes and what reads them, as in a softmax."""

NARROWEST = 32
"""Of them in a block."""

FEWEST = 2
"""Rows that are left for a reduction of XLA's. Without it the last stage would be computed again by each element of what reads it."""

WINDOW = 32
"""XLA takes many rows by so many at a time, which is fast where their number is no multiple of it, and slow where it is."""


class Fold(NamedTuple):
    """How two elements become one."""

    combine: Callable[[Any, Any], Any]
    reduce: Callable[..., Any]


FOLDS = {
    "reduce_sum": Fold(lax.add, lax.reduce_sum),
    "reduce_max": Fold(lax.max, lax.reduce_max),
    "reduce_min": Fold(lax.min, lax.reduce_min),
}


def rule(eqn: JaxprEqn, _: MadeBy) -> Replacement | None:
    operand = shape(eqn.invars[0])
    axes = eqn.params["axes"]
    together = math.prod(operand[axis] for axis in axes)
    is_long = math.prod(operand) >= LEAST
    if together == 1 or eqn.params.get("out_sharding") is not None or not (is_long or together >= MANY):
        return None
    reduce = folded_over if is_long else reduced_over
    return Replacement(functools.partial(in_turn, axes=axes, reduce=reduce, fold=FOLDS[eqn.primitive.name]), eqn.invars)


def in_turn(x: Any, axes: Sequence[int], reduce: Callable[[Any, int, Fold], Any], fold: Fold) -> Any:
    """Return the reduction over these axes, the last ones first; neighbours are one dimension."""
    dtype = x.dtype
    x = x.astype("float32")
    for start, stop in reversed(neighbours_among(sorted(axes))):
        x = reduce(x.reshape(*x.shape[:start], -1, *x.shape[stop:]), start, fold)
    return x.astype(dtype)


def reduced_over(x: Any, axis: int, fold: Fold) -> Any:
    """Return the reduction over one dimension, by loops of XLA's: one, or two where elements are many and no neighbours of others."""
    n = x.shape[axis]
    if n < MANY or (axis == x.ndim - 1 > 0) or halfway(n) == 1:
        return fold.reduce(x, [axis])
    x = fold.reduce(x.reshape(*x.shape[:axis], halfway(n), -1, *x.shape[axis + 1 :]), [axis])
    return fold.reduce(lax.optimization_barrier(x), [axis])


def halfway(n: int) -> int:
    """Return the divisor of a number that is nearest to its root.

    >>> [halfway(n) for n in (1421, 6000, 257)]
    [29, 75, 1]
    """
    return min((d for d in range(1, n) if n % d == 0), key=lambda d: abs(d - math.sqrt(n)))


def neighbours_among(axes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last + 1) of the axes that follow on each other.

    >>> neighbours_among([0, 1, 3])
    [(0, 2), (3, 4)]
    """
    groups = itertools.groupby(enumerate(axes), lambda place: place[1] - place[0])
    found = [[axis for _, axis in group] for _, group in groups]
    return [(group[0], group[-1] + 1) for group in found]


def folded_over(x: Any, axis: int, fold: Fold) -> Any:
    """Return the reduction over one dimension, in stages."""
    while (blocks := blocks_of(x.shape[axis], is_last=axis == x.ndim - 1)) > 1:
        parts = lax.split(x, [x.shape[axis] // blocks] * blocks, axis)
        x = lax.optimization_barrier(functools.reduce(fold.combine, parts))  # XLA would make one reduction of two
    return reduced_over(x, axis, fold)


def blocks_of(n: int, is_last: bool) -> int:
    """Return into how many blocks of one size a dimension is cut; 1 where XLA takes it as it is.

    >>> [blocks_of(n, is_last=False) for n in (32768, 6000, 169, 4)]
    [16, 1, 1, 1]
    >>> [blocks_of(n, is_last=True) for n in (70000, 128, 64)]
    [16, 1, 1]
    """
    if n <= (SHORT if is_last else 2 * FEWEST) or (not is_last and n > WINDOW and n % WINDOW):
        return 1
    least = NARROWEST if is_last else FEWEST
    return next((blocks for blocks in range(AT_ONCE, 1, -1) if n % blocks == 0 and n // blocks >= least), 1)
