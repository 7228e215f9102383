"""Convolutions over some rows of the batch at a time, so that the data stays in near caches, or over two halves, for two threads.

The gradient by a kernel is a convolution whose kernel is the gradient of the output, and whose features are the rows of the batch. XLA's fast
kernel takes two to three times as long for 128 rows as for thirty-two times four rows. Threads share only the features of the result, so that
a result of few features keeps one thread busy. And the kernel copies an input that it pads. If the copy is large, the C library returns its
memory to the system and requests it again: the pages are new each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array, lax

from unisono._src.typing import Shape
from unisono._src.xla.rewrite.equations import Params
from unisono._src.xla.rewrite.window import Window, is_larger

NEAR = 1 << 20
"""Bytes of a gradient's kernel that fit in a near cache of a core."""

FEWEST = 4
"""Rows to take at a time at least, even if they make a large kernel."""

KEPT = 1 << 25
"""Bytes from which on the C library returns freed memory to the system."""

AT_ONCE = 1 << 22
"""Bytes to take at a time, of a padded input whose memory is returned, or of its result."""

FEATURES_OF_A_THREAD = 64
"""Features that the fast kernel does not share between threads."""

KERNEL_OF_A_THREAD = 5 << 16
"""Bytes of a kernel that the fast kernel does not share between threads."""

LONG = 1 << 28
"""Products from which on two threads are worth the work of joining two halves."""


class ConvolutionSizes(NamedTuple):
    """The sizes of a convolution, in any layout."""

    rows: int
    ins: int
    outs: int
    space: list[int]
    taps: list[int]
    results: tuple[int, ...]
    window: Window
    is_one_group: bool

    @classmethod
    def from_shapes(cls, x: Shape, w: Shape, params: Params) -> ConvolutionSizes:
        (row, feature, *space), (w_out, _, *w_space), _ = params["dimension_numbers"]
        space = [x[axis] for axis in space]
        taps = [w[axis] for axis in w_space]
        window = Window.of(params)
        is_one_group = params["feature_group_count"] == params["batch_group_count"] == 1
        return cls(x[row], x[feature], w[w_out], space, taps, window.results(space, taps), window, is_one_group)

    @property
    def is_gradient(self) -> bool:
        """Return whether it looks like the gradient by a kernel, whose features are the rows of the batch."""
        return is_larger(self.taps, self.results)


def is_taken_in_pieces(x: Shape, w: Shape, params: Params) -> bool:
    """Return whether a convolution over rows is computed in pieces."""
    return is_for_one_thread(x, w, params) or count_rows_at_once(x, w, params) < ConvolutionSizes.from_shapes(x, w, params).rows


# Two halves at the same time.


def is_for_one_thread(x: Shape, w: Shape, params: Params) -> bool:
    """Return whether a convolution is long and the fast kernel does not share it between threads."""
    sizes = ConvolutionSizes.from_shapes(x, w, params)
    batch = sizes.ins if sizes.is_gradient else sizes.rows
    if not sizes.is_one_group or batch < 2 or sizes.rows * math.prod(sizes.results) * math.prod(w) < LONG:
        return False
    return sizes.outs <= FEATURES_OF_A_THREAD or 4 * math.prod(w) <= KERNEL_OF_A_THREAD


def convolve_two_halves(convolve: Callable[[Array, Array], Array], x: Array, w: Array, params: Params) -> Array:
    """Return the convolution, by one call of `convolve` for each half of the batch."""
    (row, feature, *_), (_, w_in, *_), (out, *_) = params["dimension_numbers"]
    if ConvolutionSizes.from_shapes(x.shape, w.shape, params).is_gradient:
        halves = split_in_half(x.shape[feature])
        return lax.add(*map(convolve, lax.split(x, halves, feature), lax.split(w, halves, w_in)))
    return lax.concatenate([convolve(half, w) for half in lax.split(x, split_in_half(x.shape[row]), row)], out)


def split_in_half(count: int) -> list[int]:
    return [count - count // 2, count // 2]


# Some rows, or features, at a time.


def count_rows_at_once(x: Shape, w: Shape, params: Params) -> int:
    """Return the number of rows to take at a time: all of them if the padded copy is small, or if it is no convolution over rows."""
    sizes = ConvolutionSizes.from_shapes(x, w, params)
    inputs = 4 * sizes.ins * math.prod(sizes.window.padded_size(sizes.space))
    if not sizes.is_one_group or sizes.is_gradient or set(sizes.taps) == {1} or sizes.rows * inputs < KEPT:
        return sizes.rows
    return max(1, min(sizes.rows, AT_ONCE // max(inputs, 4 * sizes.outs * math.prod(sizes.results))))


def convolve_some_rows_at_a_time(convolve: Callable[[Array], Array], x: Array, axes: tuple[int, int], size: int) -> Array:
    """Return the convolution, by `convolve` of `size` rows at a time. `axes`: the axis of the rows in x, and in the result."""
    axis, result_axis = axes
    count = x.shape[axis]

    def put(y: Array, start: int | Array, size: int) -> Array:
        rows = convolve(lax.dynamic_slice_in_dim(x, start, size, axis))
        return lax.dynamic_update_slice_in_dim(y, rows, start, result_axis)

    one = jax.eval_shape(convolve, lax.slice_in_dim(x, 0, 1, axis=axis))
    y = lax.full([count if place == result_axis else length for place, length in enumerate(one.shape)], 0, one.dtype)
    whole, rest = divmod(count, size)
    y = lax.fori_loop(0, whole, lambda number, y: put(y, number * size, size), y)
    return put(y, whole * size, rest) if rest else y


def count_features_at_once(x: Shape, w: Shape, params: Params) -> int:
    """Return the number of features of a gradient by a kernel to take at a time; of another convolution, all of them."""
    sizes = ConvolutionSizes.from_shapes(x, w, params)
    if not sizes.is_one_group or not sizes.is_gradient:
        return sizes.ins
    most = max(FEWEST, NEAR // (4 * math.prod(sizes.taps) * sizes.outs))
    return math.ceil(sizes.ins / math.ceil(sizes.ins / most))


def convolve_some_features_at_a_time(
    convolve: Callable[[Array, Array], Array], x: Array, w: Array, axes: tuple[int, int], size: int
) -> Array:
    """Return the convolution, as a sum of `convolve` of `size` features at a time. `axes`: the axes of the features in x and in w."""
    count = x.shape[axes[0]]

    def convolve_some(start: int | Array, size: int) -> Array:
        return convolve(
            *(lax.dynamic_slice_in_dim(operand, start, size, axis) for operand, axis in zip((x, w), axes, strict=True))
        )

    whole, rest = divmod(count, size)
    total = convolve_some(whole * size, rest) if rest else None
    if total is None:
        total = convolve_some((whole - 1) * size, size)
        whole -= 1
    return lax.fori_loop(0, whole, lambda number, total: lax.add(total, convolve_some(number * size, size)), total)
