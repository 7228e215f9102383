"""Calls of the kernels for products of matrices, in traced programs."""

from __future__ import annotations

import jax
from jax import Array


def call_transposed_product(left: Array, right: Array) -> Array:
    """Return transposed `left` times `right`, two matrices with the same number of rows."""
    call = jax.ffi.ffi_call("unisono_multiply_transposed", jax.ShapeDtypeStruct((left.shape[1], right.shape[1]), left.dtype))
    return call(left, right)


def call_product(left: Array, right: Array, is_transposed: bool = False) -> Array:
    """Return `left` times `right`, or times transposed `right`."""
    shape = (left.shape[0], right.shape[0 if is_transposed else 1])
    return jax.ffi.ffi_call("unisono_multiply", jax.ShapeDtypeStruct(shape, left.dtype))(left, right, is_transposed=is_transposed)


def call_product_with_bias(left: Array, right: Array, bias: Array, is_rectified: bool) -> Array:
    """Return `call_product` plus a number for each column; of a rectified result, what is negative is zero."""
    call = jax.ffi.ffi_call("unisono_multiply_with_bias", jax.ShapeDtypeStruct((left.shape[0], right.shape[1]), left.dtype))
    return call(left, right, bias, is_rectified=is_rectified)
