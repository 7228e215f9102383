"""Contractions whose bits do not depend on the number of threads.

XLA:CPU computes most products and convolutions with YNNPACK, whose bits are the same for every pool of threads, and the
others with Eigen. Eigen cuts a long contraction with a small result by the number of threads, and takes it in other blocks
for one thread than for several. So what Eigen would cut is brought to a form that YNNPACK takes, which is no slower.
"""

from __future__ import annotations

import math
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from unisono.xla.rewrite.equations import MadeBy, Replacement, shape

SAFE_LENGTH = 64
"""Eigen takes up to so many terms in one block and, unless the result is tiny, does not share them between threads."""

LEAST_LENGTH = 16
"""Eigen never shares fewer terms: each of two threads would get less than 8."""


def is_cut(rows: int, length: int, columns: int) -> bool:
    """Whether Eigen might cut sums of `length` terms, for a result of (rows, columns), by the number of threads."""
    return length > SAFE_LENGTH or (length >= LEAST_LENGTH and max(rows, columns) < length // 2)


def rule(eqn: JaxprEqn, _: MadeBy) -> Replacement | None:
    """A product whose left operand is contracted over its last dimensions, as YNNPACK takes it.

    The gradients by a Dense layer's kernel are others. The barriers are for all: XLA would fold a transpose of an operand,
    or of the result, into the product, and so undo it. A product with a vector has code of its own, which nobody cuts.
    """
    params, (left, right) = eqn.params, map(shape, eqn.invars)
    (contracted, right_contracted), (batch, right_batch) = params["dimension_numbers"]
    free = [axis for axis in range(len(left)) if axis not in (*contracted, *batch)]
    rows, length = (math.prod(left[axis] for axis in axes) for axes in (free, contracted))
    columns = math.prod(n for axis, n in enumerate(right) if axis not in (*right_contracted, *right_batch))
    if min(rows, columns) == 1 or not is_cut(rows, length, columns) or params["out_sharding"] is not None:
        return None
    inner, outer = tuple(range(len(batch))), len(batch) + len(free)
    numbers = ((tuple(range(outer, len(left))), right_contracted), (inner, right_batch))

    def product(left: Any, right: Any) -> Any:
        left = lax.optimization_barrier(lax.transpose(left, (*batch, *free, *contracted)))
        y = lax.dot_general(left, right, numbers, params["precision"], params["preferred_element_type"])
        return lax.optimization_barrier(y)

    return Replacement(product, eqn.invars)
