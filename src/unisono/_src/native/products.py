"""Calls of the kernel for products of matrices, in traced programs."""

from __future__ import annotations

import jax
from jax import Array


def call_transposed_product(left: Array, right: Array) -> Array:
    """Return transposed `left` times `right`, two matrices with the same number of rows."""
    call = jax.ffi.ffi_call("unisono_multiply_transposed", jax.ShapeDtypeStruct((left.shape[1], right.shape[1]), left.dtype))
    return call(left, right)
