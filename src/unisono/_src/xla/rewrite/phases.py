"""Convolutions over an input with zeros between its elements, without the zeros.

The gradient of a strided convolution by its input is one, and so is a transposed convolution. Results that lie a multiple of
the spread apart (a "phase") meet elements at the same positions of the kernel and zeros at the others: a small convolution
for each phase, and the results are laid between each other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax

from unisono._src.xla.rewrite.window import Window

MOST_PHASES = 64
"""They are unrolled. A stride of 8 in two dimensions, or of 4 in three, is the largest that is usual between layers."""


class Phase(NamedTuple):
    """What every `spread`-th result along one dimension needs."""

    taps: slice
    """The positions of the kernel that meet elements."""
    padding: tuple[int, int]


def has_phases(window: Window) -> bool:
    dimensions = zip(window.spread, window.strides, window.dilation, strict=True)
    possible = all(stride == dilation == 1 for spread, stride, dilation in dimensions if spread > 1)
    return possible and 1 < math.prod(window.spread) <= MOST_PHASES


def in_phases(convolve: Callable[[Any, Any, Window], Any], x: Any, w: Any, window: Window) -> Any:
    space, kernel = x.shape[1:-1], w.shape[:-2]
    results = window.results(space, kernel)
    axes = [phases(*sizes) for sizes in zip(space, kernel, results, window.spread, window.padding, strict=True)]
    once = dataclasses.replace(window, spread=(1,) * len(space))
    parts: list[Any] = []
    for place in itertools.product(*axes):
        taps = w[tuple(phase.taps for phase in place)]
        small = dataclasses.replace(once, padding=tuple(phase.padding for phase in place))
        parts.append(convolve(x, taps, small) if taps.size else None)  # a kernel smaller than its stride leaves gaps
    zeros = lax.full_like(next(part for part in parts if part is not None), 0)
    return interleaved([zeros if part is None else part for part in parts], window.spread, results)


def phases(n: int, taps: int, results: int, spread: int, padding: tuple[int, int]) -> list[Phase]:
    """Result q * spread + phase meets tap k at q * spread + phase + k - low, an element where `spread` divides it."""
    if spread == 1:
        return [Phase(slice(None), padding)]
    blocks, found = -(-results // spread), []
    for phase in range(spread):
        first = (padding[0] - phase) % spread
        low = (padding[0] - phase - first) // spread
        reach = len(range(first, taps, spread)) - 1
        found.append(Phase(slice(first, None, spread), (low, blocks + reach - n - low)))
    return found


def interleaved(parts: list[Any], spread: tuple[int, ...], results: tuple[int, ...]) -> Any:
    """(rows, *results, features) of the parts, of which each phase of the last dimension comes first."""
    rows, *blocks, features = parts[0].shape
    y = lax.concatenate([lax.expand_dims(part, [0]) for part in parts], 0).reshape(*spread, rows, *blocks, features)
    rank = len(spread)
    pairs = itertools.chain.from_iterable((rank + 1 + axis, axis) for axis in range(rank))
    y = lax.transpose(y, (rank, *pairs, 2 * rank + 1))
    y = y.reshape(rows, *(n * s for n, s in zip(blocks, spread, strict=True)), features)
    return lax.slice(y, [0] * y.ndim, (rows, *results, features))
