"""Calls of the kernels around a step: for its memory, its running sums, its digests and its rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array

from unisono._src.kernels.native.library import load_in_use


def call_push(sums: Array, before: Array, arrays: Sequence[Array]) -> Array:
    """Add one contribution, the elements of `arrays` in order, to the sums.

    `sums` (place, element) hold the first `before` contributions.
    """
    result = jax.ShapeDtypeStruct(sums.shape, sums.dtype)
    call = jax.ffi.ffi_call("unisono_push_contribution", result, input_output_aliases={0: 0})
    return call(sums, before.astype("int32"), *arrays)


SUMMED_DTYPES = frozenset({"float32", "float64", "int32", "int64", "uint32", "uint64"})
"""Dtypes of sums that devices add up inside of a program."""


def call_all_reduce(numbers: Array, sums: Sequence[Array]) -> list[Array]:
    """Add up the first places of `sums` over the devices of a group.

    Each is (place, element). The devices' calls meet here, and the last one adds.

    Args:
        numbers: The number of the group, from `make_group`, or 0 for a device alone; which of its devices this one is; and the phase.
        sums: The device's sums.
    """
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in sums]
    places = {position + 1: position for position in range(len(sums))}
    return list(jax.ffi.ffi_call("unisono_all_reduce", results, input_output_aliases=places)(numbers, *sums))


def make_group(devices: int, additions: Sequence[tuple[int, int]]) -> int:
    """Make a group of devices, whose programs add up inside.

    Args:
        devices: Their number.
        additions: In order, (device, other): the sum of the first takes in the other's. Device 0 has the total at the end.
    """
    library = load_in_use()
    assert library is not None  # their programs have been compiled with kernels
    numbers = np.array(additions, np.int32).reshape(-1)
    return library.unisono_make_group(ctypes.c_int64(devices), ctypes.c_void_p(numbers.ctypes.data), ctypes.c_int64(numbers.size))


def has_group(number: int) -> bool:
    """Whether a group is there. After a kernel has failed, none of the groups of before is."""
    library = load_in_use()
    return library is not None and bool(library.unisono_has_group(ctypes.c_int32(number)))


def call_put_together(number: Array, like: jax.ShapeDtypeStruct, after: Sequence[Array]) -> Array:
    """Put an array together that lies cut over the devices of the process.

    Args:
        number: Its number, from `keep_cut_array`, as an array of one element.
        like: Its shape and dtype.
        after: Arrays that are there before it is put together.
    """
    return jax.ffi.ffi_call("unisono_put_together", like)(number, *after)


def call_come_after(array: Array, after: Sequence[Array]) -> Array:
    """Hand an array on when others are there. What is computed of the result is computed for its readers alone."""
    like = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return jax.ffi.ffi_call("unisono_come_after", like, input_output_aliases={0: 0})(array, *after)


def keep_cut_array(parts: Sequence[int], blocks: int, block_bytes: int) -> int:
    """Make an array known to programs that lies cut over devices. The result is its number.

    Args:
        parts: The addresses of its parts. They stay there until the array is dropped.
        blocks: The array is so many blocks behind each other. Each block has a run of every part, in their order.
        block_bytes: The bytes of a run.
    """
    library = load_in_use()
    assert library is not None  # the programs that read it have been compiled with kernels
    addresses = (ctypes.c_void_p * len(parts))(*parts)
    return library.unisono_keep_cut_array(
        addresses, ctypes.c_int64(len(parts)), ctypes.c_int64(blocks), ctypes.c_int64(block_bytes)
    )


def drop_cut_array(number: int) -> None:
    """Forget an array that lies cut over devices. No program that reads it may run any more."""
    library = load_in_use()
    if library is not None:
        library.unisono_drop_cut_array(ctypes.c_int32(number))


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


def open_step_memory(numbers: Array) -> Array:
    """Ask for large pages for a step's memory, and return `numbers` (int32).

    A step cannot begin without these numbers, so the pages come first.

    XLA asks for this memory in each call, and Linux clears it page by page when it is first written.
    """
    return jax.ffi.ffi_call("unisono_open_step", jax.ShapeDtypeStruct(numbers.shape, numbers.dtype))(numbers)


def keep_array(x: Array) -> Array:
    """Keep a float32 array in memory. XLA can neither compute it again for each reader, nor change its layout to suit one."""
    call = jax.ffi.ffi_call("unisono_keep_array", jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0})
    return call(x)


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
