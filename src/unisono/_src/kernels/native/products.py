"""Calls of the kernels for matmuls, in traced programs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array


def call_transposed_product(lefts: Sequence[Array], right: Array, with_sums: bool = False) -> Array:
    """Multiply transposed matrices by `right`, and stack the results.

    `with_sums` adds the sum of the rows of `right` as a last row.

    All matrices have the same number of rows.
    """
    rows = sum(left.shape[1] for left in lefts) + with_sums
    call = jax.ffi.ffi_call("unisono_multiply_transposed", jax.ShapeDtypeStruct((rows, right.shape[1]), right.dtype))
    return call(right, *lefts, with_sums=with_sums)


def call_product(left: Array, right: Array, is_transposed: bool = False) -> Array:
    """Multiply `left` by `right`, or by transposed `right`."""
    shape = (left.shape[0], right.shape[0 if is_transposed else 1])
    return jax.ffi.ffi_call("unisono_multiply", jax.ShapeDtypeStruct(shape, left.dtype))(left, right, is_transposed=is_transposed)


def call_product_with_bias(left: Array, right: Array, bias: Array, is_rectified: bool) -> Array:
    """Multiply, add a bias for each column, and apply ReLU if `is_rectified`."""
    call = jax.ffi.ffi_call("unisono_multiply_with_bias", jax.ShapeDtypeStruct((left.shape[0], right.shape[1]), left.dtype))
    return call(left, right, bias, is_rectified=is_rectified)


def call_gated_product(left: Array, right: Array, gate: Array, is_transposed: bool = False) -> Array:
    """Multiply, and set to zero where `gate` is not positive. `gate` has the result's shape."""
    call = jax.ffi.ffi_call("unisono_multiply_gated", jax.ShapeDtypeStruct(gate.shape, left.dtype))
    return call(left, right, gate, is_transposed=is_transposed)
