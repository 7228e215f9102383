"""Convolutions over an input with zeros between its elements, without the zeros.

The gradient of a strided convolution by its input is such a convolution, and so is a transposed convolution. Results that lie a
multiple of the spread apart (a "phase") meet elements at the same positions of the kernel, and zeros at the others. So each phase
is a small convolution, and the results of the phases are interleaved.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from jax import Array, lax

from unisono._src.kernels.convolution.window import Window

MOST_PHASES = 64
"""They are unrolled. A stride of 8 in two dimensions, or of 4 in three, is the largest that is usual between layers."""


class Phase(NamedTuple):
    """The operands of every `spread`-th result along one dimension."""

    taps: slice
    """The positions of the kernel that meet elements."""
    padding: tuple[int, int]

    def reverse_taps(self, size: int) -> Phase:
        """The phase for the same kernel with its last tap first. `size` is that of the kernel."""
        first = self.taps.start
        if first is None:  # all taps
            return self
        step = self.taps.step
        return self._replace(taps=slice((size - 1 - first) % step, max(0, size - first), step))


def has_phases(window: Window) -> bool:
    dimensions = zip(window.spread, window.strides, window.dilation, strict=True)
    is_possible = all(stride == dilation == 1 for spread, stride, dilation in dimensions if spread > 1)
    return is_possible and 1 < math.prod(window.spread) <= MOST_PHASES


def convolve_in_phases(
    convolve: Callable[[Array, Array, Window], Array], x: Array, w: Array, window: Window, is_reversed: bool = False
) -> Array:
    """Convolve x and w by one call of `convolve` for each phase. `is_reversed` says that w has its last tap first."""
    space = x.shape[1:-1]
    kernel = w.shape[:-2]
    results = window.results(space, kernel)
    axes = [split_into_phases(*sizes) for sizes in zip(space, kernel, results, window.spread, window.padding, strict=True)]
    if is_reversed:
        axes = [[phase.reverse_taps(size) for phase in phases] for phases, size in zip(axes, kernel, strict=True)]
    once = dataclasses.replace(window, spread=(1,) * len(space))
    parts: list[Array | None] = []
    for phases in itertools.product(*axes):
        taps = w[tuple(phase.taps for phase in phases)]
        small = dataclasses.replace(once, padding=tuple(phase.padding for phase in phases))
        parts.append(convolve(x, taps, small) if taps.size else None)  # a kernel smaller than its stride leaves gaps
    zeros = lax.full_like(next(part for part in parts if part is not None), 0)
    return interleave_phases([zeros if part is None else part for part in parts], window.spread, results)


def split_into_phases(size: int, taps: int, results: int, spread: int, padding: tuple[int, int]) -> list[Phase]:
    """Split one dimension into phases.

    Result q * spread + phase meets tap k at q * spread + phase + k - low, which is an element where `spread` divides it.
    """
    if spread == 1:
        return [Phase(slice(None), padding)]
    blocks = -(-results // spread)
    phases = []
    for phase in range(spread):
        first = (padding[0] - phase) % spread
        low = (padding[0] - phase - first) // spread
        reach = len(range(first, taps, spread)) - 1
        phases.append(Phase(slice(first, None, spread), (low, blocks + reach - size - low)))
    return phases


def interleave_phases(parts: list[Array], spread: tuple[int, ...], results: tuple[int, ...]) -> Array:
    """Interleave the phases' results to (rows, *results, features).

    The parts are in order; the phase of the last dimension changes first.
    """
    rows, *blocks, features = parts[0].shape
    y = lax.concatenate([lax.expand_dims(part, [0]) for part in parts], 0).reshape(*spread, rows, *blocks, features)
    rank = len(spread)
    pairs = itertools.chain.from_iterable((rank + 1 + axis, axis) for axis in range(rank))
    y = lax.transpose(y, (rank, *pairs, 2 * rank + 1))
    y = y.reshape(rows, *(count * step for count, step in zip(blocks, spread, strict=True)), features)
    return lax.slice(y, [0] * y.ndim, (rows, *results, features))
