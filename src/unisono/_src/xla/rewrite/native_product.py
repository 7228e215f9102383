"""Products by the native kernels: of operands that are matrices, plain or transposed, once neighbouring dimensions are joined."""

from __future__ import annotations

import math
from collections.abc import Callable

from jax import Array, lax

from unisono._src.native.library import load_kernels
from unisono._src.native.products import multiply
from unisono._src.typing import Shape

Axes = tuple[int, ...]

LEAST_COLUMNS = 16
"""Columns of the result from which on the native kernels are as fast as XLA's."""


def find_native_product(
    shapes: tuple[Shape, Shape], contracted: tuple[Axes, Axes], dtypes: set[str]
) -> Callable[[Array, Array], Array] | None:
    """Return a function that computes a product without batch dimensions by a native kernel; None if there is no kernel for it.

    `shapes` and `contracted` are those of the left operand and of the right one.
    """
    transposed = [is_transposed(*operand) for operand in zip(shapes, contracted, strict=True)]
    left, right = transposed[0], None if transposed[1] is None else not transposed[1]
    if left is None or right is None or (left and right) or dtypes != {"float32"} or load_kernels().level is None:
        return None
    rows, columns = (drop_axes(shape, axes) for shape, axes in zip(shapes, contracted, strict=True))
    depth = math.prod(shapes[0][axis] for axis in contracted[0])
    if math.prod(columns) < LEAST_COLUMNS:
        return None

    def compute(x: Array, y: Array) -> Array:
        x = lax.reshape(x, (depth, math.prod(rows)) if left else (math.prod(rows), depth))
        y = lax.reshape(y, (math.prod(columns), depth) if right else (depth, math.prod(columns)))
        return lax.reshape(multiply(x, y, left, right), (*rows, *columns))

    return compute


def is_transposed(shape: Shape, contracted: Axes) -> bool | None:
    """Return whether the contracted dimensions come first, in order; None if they neither come first nor last.

    >>> is_transposed((8, 3, 5), (0, 1)), is_transposed((8, 3, 5), (2,)), is_transposed((8, 3, 5), (1,))
    (True, False, None)
    """
    count = len(contracted)
    if contracted == tuple(range(len(shape) - count, len(shape))):
        return False
    return True if contracted == tuple(range(count)) else None


def drop_axes(shape: Shape, axes: Axes) -> Shape:
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)
