"""The window of a convolution's kernel over its input.

Each field has one number, or pair of numbers, for each dimension of space.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

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
