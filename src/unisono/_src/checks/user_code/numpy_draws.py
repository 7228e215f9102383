"""Random numbers that NumPy draws in replica code: they are drawn when the code is traced, and not by a replica."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from unisono._src.checks.user_code.undistributed_arrays import find_user_constants
from unisono._src.replica import refused_calls
from unisono._src.replica.variable_discovery import Trace


def check_numpy_draws(trace: Trace, trace_of: Callable[[int], Trace] | None, size: int, replicas: int) -> None:
    """Refuse numbers that NumPy draws for the rows of a replica: they are drawn once, when the code is traced, and stay the same.

    A second trace shows which arrays are drawn: it has other values in them.
    """
    if replicas == 1 or trace_of is None:
        return
    arrays = find_row_arrays(trace, size)
    if not arrays:
        return
    try:
        arrays_again = find_row_arrays(trace_of(size), size)
    except Exception:  # of code that can be traced only once
        return
    for array, other in zip(arrays, arrays_again, strict=False):
        if array.shape == other.shape and not np.array_equal(array, other, equal_nan=array.dtype.kind == "f"):
            refuse_numpy_draw(array, replicas)


def find_row_arrays(trace: Trace, size: int) -> list[np.ndarray]:
    """Return the arrays with as many rows as the replica that the code made, or captured, when it was traced."""
    return [
        np.asarray(constant)
        for constant in find_user_constants(trace)
        if constant.shape[0] == size and refused_calls.has_different_rows(constant)
    ]


def refuse_numpy_draw(array: np.ndarray, replicas: int) -> None:
    raise ValueError(
        f"Replica code makes an array of shape {array.shape} that is another one each time, as numpy.random does: it would be made once, when the "
        f"code is compiled, and be the same on all {replicas} replicas and in every step. Draw it with Keras, from a generator that was made in "
        f"the scope:\n\n"
        f"    with strategy.scope():\n        seeds = keras.random.SeedGenerator(0)\n\n"
        f"    keras.random.normal({array.shape}, seed=seeds)  # in replica code; also uniform, randint, shuffle\n\n"
        f"What is no random number and changes from step to step, pass as an argument."
    )
