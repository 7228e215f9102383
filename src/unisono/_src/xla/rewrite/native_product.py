"""Products of matrices by the native kernels: of a layer with its kernel, and the gradients by both.

YNNPACK needs the left matrix of a gradient by a kernel transposed. Of the other products, the native kernel is faster for many rows and a right
matrix that fits in a cache, and it can add a bias.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from jax import Array, lax

from unisono._src.native.library import load_kernels
from unisono._src.native.products import call_product, call_product_with_bias, call_transposed_product
from unisono._src.typing import Shape

LEAST_SUMMED = 128
"""Rows from which on a gradient by a kernel is faster with the native one. Alone it always is, but in a step, with small kernels, threads
wait for each other more often."""

LEAST_ROWS = 1024
LEAST_COLUMNS = 128
LEAST_DEPTH = 64
MOST_WEIGHTS = 1 << 18
"""Sizes of other products that are faster with the native kernel. The right matrix is then of 1 MiB at most."""

Axes = tuple[int, ...]
Compute = Callable[[Array, Array], Array]


def find_native_product(shapes: tuple[Shape, Shape], contracted: tuple[Axes, Axes], dtypes: set[str]) -> Compute | None:
    """Return a function that computes a product without batch dimensions by a native kernel; None if it is not for one.

    `shapes` and `contracted` are those of the left operand and of the right one.
    """
    if dtypes != {"float32"}:
        return None
    count = len(contracted[0])
    if is_for_gradient_kernel(shapes, contracted):
        return functools.partial(multiply_transposed, count)
    if is_for_product_kernel(shapes, contracted):
        return functools.partial(multiply, count, False)
    if is_for_product_kernel(shapes, contracted, is_transposed=True):
        return functools.partial(multiply, count, True)
    return None


def is_for_gradient_kernel(shapes: tuple[Shape, Shape], contracted: tuple[Axes, Axes]) -> bool:
    """Return whether the native kernel computes a product, which is summed over the first dimensions of both operands."""
    first = tuple(range(len(contracted[0])))
    rows = math.prod(shapes[0][: len(first)])
    return contracted == (first, first) and rows >= LEAST_SUMMED and load_kernels().level is not None


def is_for_product_kernel(shapes: tuple[Shape, Shape], contracted: tuple[Axes, Axes], is_transposed: bool = False) -> bool:
    """Return whether the native kernel computes a product, which is summed over the last dimensions of the left operand.

    Those of the right one are its first dimensions, or its last if it is transposed.
    """
    left, right = shapes
    count = len(contracted[0])
    last = tuple(range(len(left) - count, len(left)))
    last_of_right = tuple(range(len(right) - count, len(right)))
    if contracted != (last, last_of_right if is_transposed else tuple(range(count))):
        return False
    depth = math.prod(left[axis] for axis in last)
    weights = math.prod(right)
    is_large = depth >= LEAST_DEPTH and math.prod(left) >= LEAST_ROWS * depth and weights >= LEAST_COLUMNS * depth
    return is_large and weights <= MOST_WEIGHTS and load_kernels().level is not None


def multiply_transposed(count: int, left: Array, right: Array) -> Array:
    """Return the product of two arrays that is summed over the first dimensions of both."""
    rows = math.prod(left.shape[:count])
    product = call_transposed_product(
        lax.reshape(left, (rows, left.size // rows)), lax.reshape(right, (rows, right.size // rows))
    )
    return lax.reshape(product, (*left.shape[count:], *right.shape[count:]))


def multiply(count: int, is_transposed: bool, left: Array, right: Array) -> Array:
    """Return the product that is summed over the last dimensions of `left` and the first ones of `right`, or its last ones."""
    depth = math.prod(left.shape[-count:])
    others = right.size // depth
    matrix = lax.reshape(right, (others, depth) if is_transposed else (depth, others))
    product = call_product(lax.reshape(left, (left.size // depth, depth)), matrix, is_transposed)
    return lax.reshape(product, (*left.shape[:-count], *(right.shape[:-count] if is_transposed else right.shape[count:])))


def multiply_with_bias(count: int, is_rectified: bool, left: Array, right: Array, bias: Array) -> Array:
    """Return the product that is summed over the last dimensions of `left` and the first ones of `right`, with a bias and a rectifier."""
    depth = math.prod(left.shape[-count:])
    matrices = lax.reshape(left, (left.size // depth, depth)), lax.reshape(right, (depth, right.size // depth))
    product = call_product_with_bias(*matrices, lax.reshape(bias, (bias.size,)), is_rectified)
    return lax.reshape(product, (*left.shape[:-count], *right.shape[count:]))
