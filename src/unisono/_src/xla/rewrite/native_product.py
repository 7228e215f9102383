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
from unisono._src.native.products import call_gated_product, call_product, call_product_with_bias, call_transposed_product
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
        return functools.partial(compute_transposed_product, count)
    if is_for_product_kernel(shapes, contracted):
        return functools.partial(compute_product, count, False)
    if is_for_product_kernel(shapes, contracted, is_transposed=True):
        return functools.partial(compute_product, count, True)
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


def compute_transposed_product(count: int, left: Array, right: Array) -> Array:
    """Return the product of two arrays that is summed over the first `count` dimensions of both."""
    product = call_transposed_product([flatten_rows(left, count)], flatten_rows(right, count))
    return lax.reshape(product, (*left.shape[count:], *right.shape[count:]))


def flatten_rows(array: Array, count: int) -> Array:
    """Return an array as a matrix, whose rows are its first `count` dimensions."""
    rows = math.prod(array.shape[:count])
    return lax.reshape(array, (rows, array.size // rows))


def compute_product(count: int, is_transposed: bool, left: Array, right: Array) -> Array:
    """Return the product that is summed over the last `count` dimensions of `left`, and the first ones of `right`, or its last ones."""
    product = call_product(*flatten_operands(count, is_transposed, left, right), is_transposed)
    return lax.reshape(product, (*left.shape[:-count], *(right.shape[:-count] if is_transposed else right.shape[count:])))


def compute_product_with_bias(count: int, is_rectified: bool, left: Array, right: Array, bias: Array) -> Array:
    """Return `compute_product` of a right operand that is not transposed, with a bias and, if it is rectified, a rectifier."""
    matrices = flatten_operands(count, False, left, right)
    product = call_product_with_bias(*matrices, lax.reshape(bias, (bias.size,)), is_rectified)
    return lax.reshape(product, (*left.shape[:-count], *right.shape[count:]))


def compute_gated_product(count: int, is_transposed: bool, left: Array, right: Array, gate: Array) -> Array:
    """Return `compute_product` where `gate`, which has its shape, is positive, and zeros elsewhere."""
    matrices = flatten_operands(count, is_transposed, left, right)
    rows = matrices[0].shape[0]
    gates = lax.reshape(gate, (rows, gate.size // rows))
    return lax.reshape(call_gated_product(*matrices, gates, is_transposed), gate.shape)


def flatten_operands(count: int, is_transposed: bool, left: Array, right: Array) -> tuple[Array, Array]:
    """Return the operands of a product that is summed over the last `count` dimensions of `left` as matrices."""
    depth = math.prod(left.shape[-count:])
    shape = (right.size // depth, depth) if is_transposed else (depth, right.size // depth)
    return lax.reshape(left, (left.size // depth, depth)), lax.reshape(right, shape)
