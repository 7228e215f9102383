"""Products by the native kernel: sums over the rows of two matrices, as the gradient by a Dense layer's kernel is.

YNNPACK needs the left matrix transposed. Other products are left to XLA, which is as fast there as a kernel would be.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jax import Array, lax

from unisono._src.native.library import load_kernels
from unisono._src.native.products import call_transposed_product
from unisono._src.typing import Shape

LEAST_ROWS = 128
"""Rows from which on a step is faster with the kernel. Alone it always is, but with small kernels threads wait for each other more often."""


def find_native_product(
    shapes: tuple[Shape, Shape], contracted: tuple[tuple[int, ...], tuple[int, ...]], dtypes: set[str]
) -> Callable[[Array, Array], Array] | None:
    """Return a function that computes a product without batch dimensions by the native kernel; None if it is not for it.

    `shapes` and `contracted` are those of the left operand and of the right one.
    """
    if dtypes != {"float32"} or any(axes != tuple(range(len(axes))) for axes in contracted) or load_kernels().level is None:
        return None
    count = len(contracted[0])
    rows = math.prod(shapes[0][:count])
    columns = [math.prod(shape[count:]) for shape in shapes]
    if rows < LEAST_ROWS:
        return None

    def compute(left: Array, right: Array) -> Array:
        matrices = (lax.reshape(array, (rows, width)) for array, width in zip((left, right), columns, strict=True))
        return lax.reshape(call_transposed_product(*matrices), (*shapes[0][count:], *shapes[1][count:]))

    return compute
