"""From a pool's windows back to its elements: one elementwise expression over all of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax

from unisono._src.xla.rewrite.arrays import kept, padded, scaled, strided


class Pool(NamedTuple):
    """Windows of `size` at every multiple of `strides`."""

    size: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def overlaps(self) -> bool:
        """Whether windows share elements."""
        return any(size > stride for size, stride in zip(self.size, self.strides, strict=True))

    def number(self, tap: Sequence[Any]) -> Any:
        """Distinct for distinct taps, also for those beyond the window's end that `spread_out` asks for."""
        numbers = zip(tap, self.size, self.strides, strict=True)
        return functools.reduce(lambda total, axis: total * (-(-axis[1] // axis[2]) * axis[2]) + axis[0], numbers, 0)


def spread_out(source: Any, chosen: Any, low: Sequence[int], shape: Sequence[int], pool: Pool) -> Any:
    """Each of `shape` elements gets the sum of `source` over the windows that cover it and, where given, chose it.

    Element q * stride + phase, counted from `low` before the first, is tap phase + back * stride of window q - back. So there
    is a term for each `back`, the first window first, as select-and-scatter adds them.
    """
    blocks = [-(-(before + n) // stride) for before, n, stride in zip(low, shape, pool.strides, strict=True)]
    reach = [-(-size // stride) - 1 for size, stride in zip(pool.size, pool.strides, strict=True)]
    around = [(far, n - have, 0) for far, n, have in zip(reach, blocks, source.shape, strict=True)]
    full = [n for pair in zip(blocks, pool.strides, strict=True) for n in pair]
    at_block = range(0, len(full), 2)
    # XLA would take what depends on no argument out of a loop, as large arrays; behind the barrier it depends on one.
    phases, source = lax.optimization_barrier(([lax.broadcasted_iota("float32", full, axis + 1) for axis in at_block], source))

    def windows(values: Any, back: Sequence[int]) -> Any:
        start = [far - steps for far, steps in zip(reach, back, strict=True)]
        return lax.broadcast_in_dim(strided(values, start, blocks, [1] * len(blocks)), full, at_block)

    source = kept(padded(source, 0, around))
    chosen = None if chosen is None else kept(padded(chosen, -1, around))
    terms = []
    for back in itertools.product(*(range(far, -1, -1) for far in reach)):
        tap = [phase + first for phase, first in zip(phases, scaled(back, pool.strides), strict=True)]
        if chosen is not None:
            mine = [lax.eq(windows(chosen, back), pool.number(tap))]
        else:
            uneven = [(t, n) for t, n, stride in zip(tap, pool.size, pool.strides, strict=True) if n % stride]
            mine = [lax.lt(t, lax.full_like(t, n)) for t, n in uneven]
        term = windows(source, back)
        terms.append(functools.reduce(lambda t, m: lax.select(m, t, lax.full_like(t, 0)), mine, term))
    total = lax.reshape(functools.reduce(lax.add, terms), scaled(blocks, pool.strides))
    return strided(total, low, shape, [1] * len(blocks))
