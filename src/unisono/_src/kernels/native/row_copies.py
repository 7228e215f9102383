"""The call of the native function that copies rows on the host."""

from __future__ import annotations

import ctypes

import numpy as np

from unisono._src.kernels.native.library import load_in_use


def copy_rows(array: np.ndarray, chosen: np.ndarray, target: np.ndarray) -> bool:
    """Copy chosen rows of an array into another, past the caches.

    Returns False where there are no native kernels, and then copies nothing.

    Args:
        array: In C order.
        chosen: The numbers of the rows, within the array.
        target: In C order, of the array's dtype.
    """
    library = load_in_use()
    if library is None:
        return False
    numbers = np.ascontiguousarray(chosen, np.int64)
    library.unisono_copy_rows(
        ctypes.c_void_p(array.ctypes.data),
        ctypes.c_int64(len(array)),
        ctypes.c_int64(array.nbytes // len(array)),
        ctypes.c_void_p(numbers.ctypes.data),
        ctypes.c_int64(len(numbers)),
        ctypes.c_void_p(target.ctypes.data),
    )
    return True
