"""The kernel call that adds a contribution to the running sums.

The sums are those of a reduction tree, in a traced program.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array


def call_push(sums: Array, before: Array, arrays: Sequence[Array]) -> Array:
    """Add one contribution, the elements of `arrays` in order, to the sums.

    `sums` (place, element) hold the first `before` contributions.
    """
    result = jax.ShapeDtypeStruct(sums.shape, sums.dtype)
    call = jax.ffi.ffi_call("unisono_push_contribution", result, input_output_aliases={0: 0})
    return call(sums, before.astype("int32"), *arrays)
