"""Products by the native kernels: of operands that are matrices, plain or transposed, once neighbouring dimensions are joined."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from jax import Array, lax

from unisono._src.native.library import load_kernels
from unisono._src.native.products import call_product
from unisono._src.typing import Shape

Axes = tuple[int, ...]

LEAST_COLUMNS = 16
"""Columns of the result from which on the native kernels are as fast as XLA's."""

LEAST_ROWS = 128
"""Rows of a batch from which on they are: before a product, they bring the other operand into another order, whatever the rows."""


def find_native_product(
    shapes: tuple[Shape, Shape], contracted: tuple[Axes, Axes], dtypes: set[str]
) -> Callable[[Array, Array], Array] | None:
    """Return a function that computes a product without batch dimensions by a native kernel; None if there is no kernel for it.

    `shapes` and `contracted` are those of the left operand and of the right one.
    """
    left = find_place(shapes[0], contracted[0])
    right = find_place(shapes[1], contracted[1])
    if (
        left is None
        or right is None
        or (left, right) == ("first", "last")
        or dtypes != {"float32"}
        or load_kernels().level is None
    ):
        return None
    rows, columns = (drop_axes(shape, axes) for shape, axes in zip(shapes, contracted, strict=True))
    depth = math.prod(shapes[0][axis] for axis in contracted[0])
    rows_of_batch = depth if left == "first" else math.prod(rows)
    if math.prod(columns) < LEAST_COLUMNS or rows_of_batch < LEAST_ROWS:
        return None

    def compute(x: Array, y: Array) -> Array:
        x = lax.reshape(x, (depth, math.prod(rows)) if left == "first" else (math.prod(rows), depth))
        y = lax.reshape(y, (depth, math.prod(columns)) if right == "first" else (math.prod(columns), depth))
        return lax.reshape(call_product(x, y, left == "first", right == "last"), (*rows, *columns))

    return compute


def find_place(shape: Shape, contracted: Axes) -> Literal["first", "last"] | None:
    """Return whether the contracted dimensions come first or last, in order; None if they do neither.

    >>> find_place((8, 3, 5), (0, 1)), find_place((8, 3, 5), (2,)), find_place((8, 3, 5), (1,))
    ('first', 'last', None)
    """
    count = len(contracted)
    if contracted == tuple(range(len(shape) - count, len(shape))):
        return "last"
    return "first" if contracted == tuple(range(count)) else None


def drop_axes(shape: Shape, axes: Axes) -> Shape:
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)
