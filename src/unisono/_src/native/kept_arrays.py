"""The call of the kernel that changes nothing: XLA has the array in memory there."""

from __future__ import annotations

import jax
from jax import Array


def keep_array(x: Array) -> Array:
    """Return x, float32. XLA cannot compute it again for each reader, nor in the form in which it is read."""
    call = jax.ffi.ffi_call("unisono_keep_array", jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0})
    return call(x)
