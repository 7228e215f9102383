"""What convolutions and poolings do to arrays: pad, step through, and keep in memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax


def kept(x: Any) -> Any:
    """x, computed once and in memory.

    XLA:CPU computes most expressions again in each of their readers, which for the many windows that read an array is most of
    the time; a barrier does not keep it from that, since barriers are gone before it decides. A pad it computes once. This
    one adds a row that no reader sees, which a product with a 1 that XLA cannot see hides from it as well.
    """
    one, x = lax.optimization_barrier((lax.full((), 1, x.dtype), x))
    longer = padded(x, 0, [(0, 1, 0), *[(0, 0, 0)] * (x.ndim - 1)])
    return lax.slice(lax.mul(longer, lax.broadcast(one, longer.shape)), [0] * x.ndim, x.shape)


def padded(x: Any, value: float, config: Sequence[tuple[int, int, int]]) -> Any:
    """x with (low, high, interior) elements of `value` in each dimension."""
    return lax.pad(x, lax.full((), value, x.dtype), config)


def strided(x: Any, start: Sequence[int], shape: Sequence[int], steps: Sequence[int]) -> Any:
    """`shape` elements of x from `start`, `steps` apart."""
    ends = [first + (count - 1) * step + 1 for first, count, step in zip(start, shape, steps, strict=True)]
    return lax.slice(x, start, ends, steps)


def scaled(numbers: Iterable[int], factors: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(operator.mul, numbers, factors))
