"""The window of a convolution's kernel over its input.

Each field has one number, or pair of numbers, for each dimension of space.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax import Array, lax

from unisono._src.programs.equations import Params
from unisono._src.typing import Keywords


@dataclasses.dataclass(frozen=True)
class Window:
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    spread: tuple[int, ...]
    """The dilation of the input ("lhs"): elements of the input lie this far apart, with zeros between them."""
    dilation: tuple[int, ...]
    """The dilation of the kernel ("rhs")."""

    @classmethod
    def of(cls, params: Params) -> Window:
        """The window of a convolution with these parameters."""
        padding = tuple((low, high) for low, high in params["padding"])
        return cls(tuple(params["window_strides"]), padding, tuple(params["lhs_dilation"]), tuple(params["rhs_dilation"]))

    @property
    def params(self) -> Keywords:
        """The window as arguments of `jax.lax.conv_general_dilated`."""
        return {
            "window_strides": self.strides,
            "padding": self.padding,
            "lhs_dilation": self.spread,
            "rhs_dilation": self.dilation,
        }

    def results(self, space: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Compute the output's size."""
        sizes = zip(self.padded_size(space), kernel, self.strides, self.dilation, strict=True)
        return tuple((size - (taps - 1) * dilation - 1) // stride + 1 for size, taps, stride, dilation in sizes)

    def padded_size(self, space: Sequence[int]) -> tuple[int, ...]:
        """Compute the input's size with zeros between its elements and around it."""
        sizes = zip(space, self.padding, self.spread, strict=True)
        return tuple((size - 1) * spread + 1 + low + high for size, (low, high), spread in sizes)

    def swap_operands(self, space: Sequence[int], kernel: Sequence[int]) -> Window:
        """The window of the same convolution with its operands swapped.

        The (reversed) kernel becomes the input, the (reversed) input the kernel.
        """
        sizes = zip(space, kernel, self.padding, self.spread, self.dilation, strict=True)
        grown = [(size - 1) * spread - (taps - 1) * dilation for size, taps, _, spread, dilation in sizes]
        padding = tuple((low + more, high + more) for (low, high), more in zip(self.padding, grown, strict=True))
        return dataclasses.replace(self, padding=padding, spread=self.dilation, dilation=self.spread)

    def add_first_dimension(self) -> Window:
        """Add a first dimension, of size 1."""
        return Window((1, *self.strides), ((0, 0), *self.padding), (1, *self.spread), (1, *self.dilation))

    def drop_first_dimension(self) -> Window:
        return Window(self.strides[1:], self.padding[1:], self.spread[1:], self.dilation[1:])


def is_larger(kernel: Sequence[int], space: Sequence[int]) -> bool:
    """Whether the kernel has more elements than the input. XLA then swaps the two."""
    return math.prod(kernel) > math.prod(space)


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
