"""Calls of the kernels for products of matrices, in traced programs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array


def call_transposed_product(lefts: Sequence[Array], right: Array, with_sums: bool = False) -> Array:
    """Return transposed matrices times `right`, one product below the other; with sums, the sum of the rows of `right` as one more row.

    All matrices have the same number of rows.
    """
    rows = sum(left.shape[1] for left in lefts) + with_sums
    call = jax.ffi.ffi_call("unisono_multiply_transposed", jax.ShapeDtypeStruct((rows, right.shape[1]), right.dtype))
    return call(right, *lefts, with_sums=with_sums)


def call_product(left: Array, right: Array, is_transposed: bool = False) -> Array:
    """Return `left` times `right`, or times transposed `right`."""
    shape = (left.shape[0], right.shape[0 if is_transposed else 1])
    return jax.ffi.ffi_call("unisono_multiply", jax.ShapeDtypeStruct(shape, left.dtype))(left, right, is_transposed=is_transposed)


def call_product_with_bias(left: Array, right: Array, bias: Array, is_rectified: bool) -> Array:
    """Return `call_product` plus a number for each column; of a rectified result, what is negative is zero."""
    call = jax.ffi.ffi_call("unisono_multiply_with_bias", jax.ShapeDtypeStruct((left.shape[0], right.shape[1]), left.dtype))
    return call(left, right, bias, is_rectified=is_rectified)


def call_gated_product(left: Array, right: Array, gate: Array, is_transposed: bool = False) -> Array:
    """Return `call_product` where `gate`, which has its shape, is positive, and zeros elsewhere."""
    call = jax.ffi.ffi_call("unisono_multiply_gated", jax.ShapeDtypeStruct(gate.shape, left.dtype))
    return call(left, right, gate, is_transposed=is_transposed)
