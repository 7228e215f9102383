"""The call of the kernel that adds a contribution to the sums of a reduction tree, in traced programs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array


def call_push(sums: Array, before: Array, arrays: Sequence[Array]) -> Array:
    """Return sums (place, element) of `before` contributions with one more, which is the elements of these arrays in order."""
    result = jax.ShapeDtypeStruct(sums.shape, sums.dtype)
    call = jax.ffi.ffi_call("unisono_push_contribution", result, input_output_aliases={0: 0})
    return call(sums, before.astype("int32"), *arrays)
