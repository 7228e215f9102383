"""The way from a pool's windows back to its elements: one elementwise expression over all of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jax import Array, lax

from unisono._src.xla.rewrite.arrays import keep_in_memory, multiply_pairwise, pad_array, slice_with_steps


class Pool(NamedTuple):
    """Windows of `size` at every multiple of `strides`."""

    size: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def has_overlap(self) -> bool:
        """Return whether windows share elements."""
        return any(size > stride for size, stride in zip(self.size, self.strides, strict=True))

    def number(self, tap: Sequence[int | Array]) -> int | Array:
        """Return a number that is distinct for distinct taps, also for taps beyond the window's end, which `sum_over_windows` needs."""
        numbers = zip(tap, self.size, self.strides, strict=True)
        return functools.reduce(lambda total, axis: total * (-(-axis[1] // axis[2]) * axis[2]) + axis[0], numbers, 0)


def sum_over_windows(source: Array, chosen: Array | None, low: Sequence[int], shape: Sequence[int], pool: Pool) -> Array:
    """Return, for each of `shape` elements, the sum of `source` over the windows that cover it and, if `chosen` is given, chose it.

    Element q * stride + phase, counted from `low` before the first, is tap phase + back * stride of window q - back. So there
    is a term for each `back`, the first window first: the order in which select-and-scatter adds.
    """
    blocks = [-(-(before + size) // stride) for before, size, stride in zip(low, shape, pool.strides, strict=True)]
    reach = [-(-size // stride) - 1 for size, stride in zip(pool.size, pool.strides, strict=True)]
    around = [(far, count - available, 0) for far, count, available in zip(reach, blocks, source.shape, strict=True)]
    full = [size for pair in zip(blocks, pool.strides, strict=True) for size in pair]
    at_block = range(0, len(full), 2)
    # XLA would move expressions that depend on no argument out of a loop, as large arrays; behind the barrier they depend on one.
    phases, source = lax.optimization_barrier(([lax.broadcasted_iota("float32", full, axis + 1) for axis in at_block], source))

    def read_windows(values: Array, back: Sequence[int]) -> Array:
        start = [far - steps for far, steps in zip(reach, back, strict=True)]
        return lax.broadcast_in_dim(slice_with_steps(values, start, blocks, [1] * len(blocks)), full, at_block)

    source = keep_in_memory(pad_array(source, 0, around))
    chosen = None if chosen is None else keep_in_memory(pad_array(chosen, -1, around))
    terms = []
    for back in itertools.product(*(range(far, -1, -1) for far in reach)):
        tap = [phase + first for phase, first in zip(phases, multiply_pairwise(back, pool.strides), strict=True)]
        if chosen is not None:
            masks = [lax.eq(read_windows(chosen, back), pool.number(tap))]
        else:
            uneven = [(place, size) for place, size, stride in zip(tap, pool.size, pool.strides, strict=True) if size % stride]
            masks = [lax.lt(place, lax.full_like(place, size)) for place, size in uneven]
        term = read_windows(source, back)
        terms.append(functools.reduce(lambda total, mask: lax.select(mask, total, lax.full_like(total, 0)), masks, term))
    total = lax.reshape(functools.reduce(lax.add, terms), multiply_pairwise(blocks, pool.strides))
    return slice_with_steps(total, low, shape, [1] * len(blocks))
