"""Matmuls by the native kernels: a layer's own, and both gradients.

YNNPACK needs the left matrix of a gradient by a kernel transposed. Of the other matmuls, the native kernel is faster for many
rows and a right matrix that fits in a cache, and it can add a bias.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from jax import Array, lax

from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.native.products import call_gated_product, call_product, call_product_with_bias, call_transposed_product
from unisono._src.typing import Shape

LEAST_SUMMED = 128
"""The fewest rows for which the native kernel is faster for a gradient by a kernel. Alone it always is, but in a step, with small kernels,
threads wait for each other more often."""

LEAST_ROWS = 1024
LEAST_COLUMNS = 128
LEAST_DEPTH = 64
MOST_WEIGHTS = 1 << 18
"""Sizes of other matmuls that are faster with the native kernel. The right matrix then has at most 1 MiB."""

Axes = tuple[int, ...]
Compute = Callable[[Array, Array], Array]


def find_native_product(shapes: tuple[Shape, Shape], contracted: tuple[Axes, Axes], dtypes: set[str]) -> Compute | None:
    """Find the native kernel's function for a matmul without batch dimensions. None if no kernel takes it.

    Args:
        shapes: Of the left operand and of the right one.
        contracted: The contracted dimensions of each.
        dtypes: Of operands and result.
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
    """Whether the native kernel takes a matmul over first dimensions. They are contracted in both operands."""
    first = tuple(range(len(contracted[0])))
    rows = math.prod(shapes[0][: len(first)])
    return contracted == (first, first) and rows >= LEAST_SUMMED and load_kernels().level is not None


def is_for_product_kernel(shapes: tuple[Shape, Shape], contracted: tuple[Axes, Axes], is_transposed: bool = False) -> bool:
    """Whether the native kernel takes a matmul over the left's last dimensions.

    In the right operand they are the first ones, or the last if it is transposed.
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
    """Contract two arrays over the first `count` dimensions of both."""
    product = call_transposed_product([flatten_rows(left, count)], flatten_rows(right, count))
    return lax.reshape(product, (*left.shape[count:], *right.shape[count:]))


def flatten_rows(array: Array, count: int) -> Array:
    """Flatten an array to a matrix: its first `count` dimensions become rows."""
    rows = math.prod(array.shape[:count])
    return lax.reshape(array, (rows, array.size // rows))


def compute_product(count: int, is_transposed: bool, left: Array, right: Array) -> Array:
    """Contract the last `count` dimensions of `left` with `right`.

    There they are the first ones, or the last ones if it is transposed.
    """
    product = call_product(*flatten_operands(count, is_transposed, left, right), is_transposed)
    return lax.reshape(product, (*left.shape[:-count], *(right.shape[:-count] if is_transposed else right.shape[count:])))


def compute_product_with_bias(count: int, is_rectified: bool, left: Array, right: Array, bias: Array) -> Array:
    """Compute `compute_product`, add a bias, and apply ReLU if `is_rectified`. The right operand is not transposed."""
    matrices = flatten_operands(count, False, left, right)
    product = call_product_with_bias(*matrices, lax.reshape(bias, (bias.size,)), is_rectified)
    return lax.reshape(product, (*left.shape[:-count], *right.shape[count:]))


def compute_gated_product(count: int, is_transposed: bool, left: Array, right: Array, gate: Array) -> Array:
    """Compute `compute_product`, with zeros where `gate` is not positive. `gate` has its shape."""
    matrices = flatten_operands(count, is_transposed, left, right)
    rows = matrices[0].shape[0]
    gates = lax.reshape(gate, (rows, gate.size // rows))
    return lax.reshape(call_gated_product(*matrices, gates, is_transposed), gate.shape)


def flatten_operands(count: int, is_transposed: bool, left: Array, right: Array) -> tuple[Array, Array]:
    """Flatten the operands to matrices, contracted over `count` dimensions of `left`."""
    depth = math.prod(left.shape[-count:])
    shape = (right.size // depth, depth) if is_transposed else (depth, right.size // depth)
    return lax.reshape(left, (left.size // depth, depth)), lax.reshape(right, shape)
