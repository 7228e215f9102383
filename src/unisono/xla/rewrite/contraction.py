"""Contractions whose bits do not depend on the number of threads.

XLA:CPU computes most products and convolutions with YNNPACK, whose bits are the same for every pool of threads, and the
others with Eigen. Eigen cuts a long contraction with a small result by the number of threads, and a large result in blocks by it, at
whose edges it adds in another order. So what Eigen would take is brought to a form that YNNPACK takes, which is no slower.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from unisono.xla.rewrite.equations import MadeBy, Replacement, shape
from unisono.xla.rewrite.window import Shape

Axes = tuple[int, ...]

LEAST = 8
"""YNNPACK takes a product of which one dimension has so many elements; of smaller ones XLA makes loops of its own."""


def rule(eqn: JaxprEqn, _: MadeBy) -> Replacement | None:
    """A product whose left operand is contracted over its last dimensions, as YNNPACK takes it.

    The gradients by a Dense layer's kernel are others. A product with a vector has code of its own, which nobody cuts.
    """
    params, (left, right) = eqn.params, map(shape, eqn.invars)
    (of_left, of_right), (batch, right_batch) = params["dimension_numbers"]
    left_free, right_free = free(left, of_left, batch), free(right, of_right, right_batch)
    rows, columns, length = (
        math.prod(a[axis] for axis in axes) for a, axes in ((left, left_free), (right, right_free), (left, of_left))
    )
    if min(rows, columns) == 1 or max(rows, length, columns) < LEAST or params["out_sharding"] is not None:
        return None
    product = functools.partial(contracted_last, params)
    is_last = (*batch, *left_free, *of_left) == tuple(range(len(left)))
    if is_last or math.prod(left) <= math.prod(right) + math.prod(shape(eqn.outvars[0])):
        return Replacement(lambda left, right: product(left, right, (of_left, of_right), (batch, right_batch)), eqn.invars)
    # The other way round the smaller one is brought into order, and the result.
    ahead = len(batch)
    back = (
        *range(ahead),
        *range(ahead + len(right_free), ahead + len(right_free) + len(left_free)),
        *range(ahead, ahead + len(right_free)),
    )

    def swapped(left: Any, right: Any) -> Any:
        return lax.transpose(product(right, left, (of_right, of_left), (right_batch, batch)), back)

    return Replacement(swapped, eqn.invars)


def free(of: Shape, contracted: Axes, batch: Axes) -> Axes:
    return tuple(axis for axis in range(len(of)) if axis not in (*contracted, *batch))


def contracted_last(
    params: Mapping[str, Any], left: Any, right: Any, contracted: tuple[Axes, Axes], batch: tuple[Axes, Axes]
) -> Any:
    """The product of the operands, the left one's contracted dimensions behind all others.

    The barriers are for all: XLA would fold a transpose of an operand, or of the result, into the product, and so undo it.
    """
    outside = (*batch[0], *free(left.shape, contracted[0], batch[0]))
    left = lax.optimization_barrier(lax.transpose(left, (*outside, *contracted[0])))
    numbers = ((tuple(range(len(outside), left.ndim)), contracted[1]), (tuple(range(len(batch[0]))), batch[1]))
    return lax.optimization_barrier(lax.dot_general(left, right, numbers, params["precision"], params["preferred_element_type"]))
