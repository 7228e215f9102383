"""Calls of the kernels for products of matrices, in traced programs."""

from __future__ import annotations

import jax
from jax import Array


def call_product(left: Array, right: Array, is_left_transposed: bool, is_right_transposed: bool) -> Array:
    """Return left * right, where each is read transposed if that is said; not both."""
    shape = left.shape[is_left_transposed], right.shape[not is_right_transposed]
    call = jax.ffi.ffi_call("unisono_multiply", jax.ShapeDtypeStruct(shape, left.dtype))
    return call(left, right, is_left_transposed=is_left_transposed, is_right_transposed=is_right_transposed)
