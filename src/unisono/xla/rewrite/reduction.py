"""Sums whose bits do not depend on the number of threads.

XLA:CPU shares a long sum between threads, so that its parts, and its bits, depend on how many there are. A short one it does
not share. So a long sum becomes sums of short ones, over one dimension after another, and over pieces of a long dimension; or,
where there are many beside each other, additions of whole rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from unisono.xla.rewrite.arrays import padded
from unisono.xla.rewrite.equations import MadeBy, Replacement, shape

UNSHARED = 1 << 14
"""Elements that one thread takes by itself. Of somewhat more than twice as many, several do."""

WIDE = 1 << 10
"""Where more sums than this lie beside each other, rows are added."""

AT_ONCE = 8
"""How many rows one addition takes."""


def rule(eqn: JaxprEqn, _: MadeBy) -> Replacement | None:
    operand, axes = shape(eqn.invars[0]), eqn.params["axes"]
    summed = math.prod(operand[axis] for axis in axes)
    if summed == 1 or math.prod(operand) <= UNSHARED or eqn.params["out_sharding"] is not None:
        return None
    return Replacement(functools.partial(in_stages, axes=axes), eqn.invars)


def in_stages(x: Any, axes: Sequence[int]) -> Any:
    """The sum over these axes: first over the last ones of them, as many as are short together."""
    dtype, axes = x.dtype, sorted(axes)
    x = x.astype("float32")
    while axes:
        beside = math.prod(x.shape[axes[-1] + 1 :])
        now: list[int] = []
        while axes and beside * math.prod(x.shape[axis] for axis in [axes[-1], *now]) <= UNSHARED:
            now.append(axes.pop())
        if now:
            x = lax.reduce_sum(x, now)
        elif beside > WIDE:
            x = added(x, axes.pop())
        else:
            x = lax.reduce_sum(cut(x, axes[-1], UNSHARED // beside), [axes[-1] + 1])
        if axes:
            x = lax.optimization_barrier(x)  # XLA would make one sum of two
    return x.astype(dtype)


def added(x: Any, axis: int) -> Any:
    """The sum over a dimension: blocks of rows are added to each other until one row is left."""
    while (n := x.shape[axis]) > 1:
        size = math.ceil(n / AT_ONCE)
        blocks = [lax.slice_in_dim(x, start, min(n, start + size), axis=axis) for start in range(0, n, size)]
        missing = size - blocks[-1].shape[axis]
        blocks[-1] = padded(blocks[-1], 0, [(0, missing * (place == axis), 0) for place in range(x.ndim)])
        x = lax.optimization_barrier(functools.reduce(lax.add, blocks))
    return lax.squeeze(x, [axis])


def cut(x: Any, axis: int, most: int) -> Any:
    """With two dimensions in place of this one, of which the second has so many elements or less."""
    n = x.shape[axis]
    length = next(size for size in range(most, 0, -1) if n % size == 0)
    if 2 * length < most:  # zeros make it divisible; the barrier, since with them in it the sum would be another program
        length = most
        x = padded(x, 0, [(0, -n % length * (place == axis), 0) for place in range(x.ndim)])
        x = lax.optimization_barrier(x)
    return x.reshape(*x.shape[:axis], -1, length, *x.shape[axis + 1 :])
