"""Pad, slice with steps, and keep arrays in memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from jax import Array, lax

from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.native.step_calls import keep_array


def keep_in_memory(x: Array) -> Array:
    """Compute x once and keep it in memory.

    XLA:CPU computes most expressions again for each reader, and with many windows that read one array this takes most of the
    time. A barrier does not prevent it, because XLA removes barriers before it decides. XLA computes a pad once. So this function
    adds a row that no reader sees, and hides from XLA that nobody sees it: it multiplies by a 1 whose value XLA does not know.
    """
    one, x = lax.optimization_barrier((lax.full((), 1, x.dtype), x))
    longer = pad_array(x, 0, [(0, 1, 0), *[(0, 0, 0)] * (x.ndim - 1)])
    return lax.slice(lax.mul(longer, lax.broadcast(one, longer.shape)), [0] * x.ndim, x.shape)


def has_place_in_memory(dtype: str) -> bool:
    """Whether a kernel can keep an array of this dtype in memory."""
    return dtype == "float32" and load_kernels().level is not None


def put_in_memory(x: Array) -> Array:
    """Make XLA store x here, if there is a kernel for it. Code before and after this point is then compiled apart.

    In contrast to `keep_in_memory`, readers of x cannot compute a part of it again. Without kernels, XLA decides.
    """
    return keep_array(x) if has_place_in_memory(x.dtype.name) else x


def pad_array(x: Array, value: float, config: Sequence[tuple[int, int, int]]) -> Array:
    """Pad x with (low, high, interior) elements of `value` in each dimension."""
    return lax.pad(x, lax.full((), value, x.dtype), config)


def slice_with_steps(x: Array, start: Sequence[int], shape: Sequence[int], steps: Sequence[int]) -> Array:
    """Slice `shape` elements of x from `start`, `steps` apart."""
    ends = [first + (count - 1) * step + 1 for first, count, step in zip(start, shape, steps, strict=True)]
    return lax.slice(x, start, ends, steps)


def multiply_pairwise(numbers: Iterable[int], factors: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(operator.mul, numbers, factors))
