"""The calls of the kernels that digest arrays.

`digest.py` says what a digest is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array

from unisono._src.native.library import load_in_use


def call_digest(arrays: Sequence[Array], parts: Sequence[tuple[int, int, int]]) -> Array:
    """Digest parts of arrays, each given as (array, first element, elements). The result is (part, lane)."""
    result = jax.ShapeDtypeStruct((len(parts), 2), np.uint32)
    numbers = np.array(parts, np.int64).reshape(-1)
    return jax.ffi.ffi_call("unisono_digest_parts", result)(*arrays, parts=numbers)


def call_digest_on_host(array: np.ndarray, first: int) -> tuple[int, int] | None:
    """Digest a NumPy array in C order. None where there are no native kernels.

    Its words count as those from `first` on of a larger array.
    """
    library = load_in_use()
    if library is None:
        return None
    lanes = (ctypes.c_uint32 * 2)()
    data = ctypes.c_void_p(array.ctypes.data)
    library.unisono_digest_memory(data, ctypes.c_int64(array.size), ctypes.c_int64(array.itemsize), ctypes.c_int64(first), lanes)
    return lanes[0], lanes[1]
