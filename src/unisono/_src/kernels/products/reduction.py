"""Sums in fast forms, with an order of additions that we choose.

By default XLA:CPU gives long sums to YNNPACK, which cuts them by the number of threads, so that their bits depend on it. Our
programs are compiled without YNNPACK's sums (`determinism.get_compiler_options`). XLA's own loops compute one result after
another, over columns ten times slower. So a long sum becomes additions of whole blocks, up to sixteen in one expression, repeated
until few elements are left. The rest, like a sum of some hundred elements, is computed in two steps. Shapes alone decide how a
sum is cut. Maxima and minima are computed the same way.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax import Array, lax
from jax.extend.core import JaxprEqn

from unisono._src.kernels.products.arrays import put_in_memory
from unisono._src.programs.equations import Producers, Replacement
from unisono._src.programs.operands import get_shape

LEAST = 1 << 13
"""The fewest elements for which a reduction is taken in stages."""

MANY = 1 << 8
"""The fewest elements of one result for which it is computed in two steps. XLA adds up rows of several dimensions one after another: this is
two to four times as slow, and the sums are ten times less exact."""

AT_ONCE = 16
"""Blocks in one expression, at most."""

AT_FIRST = 15
"""Blocks in the first expression, at most. XLA computes an operand inside of the expression that reads it, instead of writing it to memory,
if the expression has at most 15 places that read it. Each element is computed once nevertheless, since the blocks share none."""

SHORT = 1 << 12
"""Neighbours in memory that are left to a loop of XLA. It is fused with the operations before and after it, as in a softmax."""

NARROWEST = 32
"""Neighbours in memory in a block, at least."""

FEWEST = 2
"""Rows that are left for a reduction of XLA. Without it, each element of a reader would compute the last stage again."""

WINDOW = 32
"""Rows that XLA takes at a time. This is fast if the number of rows is no multiple of it, and slow if it is one."""


class Fold(NamedTuple):
    """A reduction: how to combine two elements, and how to reduce many."""

    combine: Callable[[Array, Array], Array]
    reduce: Callable[[Array, Sequence[int]], Array]


FOLDS = {
    "reduce_sum": Fold(lax.add, lax.reduce_sum),
    "reduce_max": Fold(lax.max, lax.reduce_max),
    "reduce_min": Fold(lax.min, lax.reduce_min),
}


def replace_reduction(eqn: JaxprEqn, _: Producers) -> Replacement | None:
    """Replace a reduction of many elements, in all or for each result."""
    operand = get_shape(eqn.invars[0])
    axes = eqn.params["axes"]
    per_result = math.prod(operand[axis] for axis in axes)
    is_long = math.prod(operand) >= LEAST
    if per_result == 1 or eqn.params.get("out_sharding") is not None or not (is_long or per_result >= MANY):
        return None
    reduce = fold_axis if is_long else reduce_axis
    return Replacement(functools.partial(reduce_axes, axes=axes, reduce=reduce, fold=FOLDS[eqn.primitive.name]), eqn.invars)


def reduce_axes(x: Array, axes: Sequence[int], reduce: Callable[[Array, int, Fold], Array], fold: Fold) -> Array:
    """Reduce over these axes, the last ones first. Neighbouring axes are reduced as one."""
    dtype = x.dtype
    x = x.astype("float32")
    for start, stop in reversed(group_neighbours(sorted(axes))):
        x = reduce(x.reshape(*x.shape[:start], -1, *x.shape[stop:]), start, fold)
    return x.astype(dtype)


def reduce_axis(x: Array, axis: int, fold: Fold) -> Array:
    """Reduce one dimension by one loop of XLA, or by two. It takes two for many elements that are not neighbours in memory."""
    size = x.shape[axis]
    if size < MANY or (axis == x.ndim - 1 > 0) or find_middle_divisor(size) == 1:
        return fold.reduce(x, [axis])
    x = fold.reduce(x.reshape(*x.shape[:axis], find_middle_divisor(size), -1, *x.shape[axis + 1 :]), [axis])
    return fold.reduce(lax.optimization_barrier(x), [axis])


def find_middle_divisor(number: int) -> int:
    """Find the divisor of a number nearest to its square root.

    >>> [find_middle_divisor(n) for n in (1421, 6000, 257)]
    [29, 75, 1]
    """
    return min(
        (divisor for divisor in range(1, number) if number % divisor == 0), key=lambda divisor: abs(divisor - math.sqrt(number))
    )


def group_neighbours(axes: Sequence[int]) -> list[tuple[int, int]]:
    """Group consecutive axes to (first, last + 1).

    >>> group_neighbours([0, 1, 3])
    [(0, 2), (3, 4)]
    """
    groups = itertools.groupby(enumerate(axes), lambda place: place[1] - place[0])
    runs = [[axis for _, axis in group] for _, group in groups]
    return [(run[0], run[-1] + 1) for run in runs]


def fold_axis(x: Array, axis: int, fold: Fold) -> Array:
    """Reduce one dimension, in stages."""
    count = functools.partial(count_blocks, is_last=axis == x.ndim - 1)
    blocks = count(x.shape[axis], AT_FIRST)
    while blocks > 1:
        x = functools.reduce(fold.combine, lax.split(x, [x.shape[axis] // blocks] * blocks, axis))
        x = lax.optimization_barrier(x)  # XLA would make one reduction of two
        blocks = count(x.shape[axis], AT_ONCE)
        # XLA would compute this stage inside of a next one with few blocks, and then the operand of this stage inside of neither. It would
        # compute the last stage inside of the loop for the rest, which is given to one thread if the rest is small.
        x = put_in_memory(x) if blocks <= AT_FIRST else x
    return reduce_axis(x, axis, fold)


def count_blocks(size: int, at_most: int, *, is_last: bool) -> int:
    """Count the equal blocks that a dimension is cut into. 1 means that XLA takes it as it is.

    >>> [count_blocks(n, 16, is_last=False) for n in (32768, 6000, 169, 4)]
    [16, 1, 1, 1]
    >>> [count_blocks(n, 15, is_last=True) for n in (70000, 128, 64)]
    [14, 1, 1]
    """
    if size <= (SHORT if is_last else 2 * FEWEST) or (not is_last and size > WINDOW and size % WINDOW):
        return 1
    least = NARROWEST if is_last else FEWEST
    return next((blocks for blocks in range(at_most, 1, -1) if size % blocks == 0 and size // blocks >= least), 1)
