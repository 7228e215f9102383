"""The kernel call that changes nothing, and makes XLA store its operand."""

from __future__ import annotations

import jax
from jax import Array


def keep_array(x: Array) -> Array:
    """Keep a float32 array in memory. XLA can neither compute it again for each reader, nor change its layout to suit one."""
    call = jax.ffi.ffi_call("unisono_keep_array", jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0})
    return call(x)
