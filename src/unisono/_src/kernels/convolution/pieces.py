"""Convolutions over some rows at a time, or over half batches.

Some rows at a time keep the data in near caches; two halves occupy two threads. The gradient by a kernel is a convolution whose
kernel is the gradient of the output, and whose features are the rows of the batch. XLA's fast kernel takes two to three times as
long for 128 rows as for thirty-two times four rows. Threads share only the features of the result, so that a result of few
features keeps one thread busy. And the kernel copies an input that it pads. If the copy is large, the C library returns its
memory to the system and requests it again: the pages are new each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array, lax

from unisono._src.kernels.convolution.window import Window, is_larger
from unisono._src.programs.equations import Params
from unisono._src.typing import Shape

NEAR = 1 << 20
"""Bytes of a gradient's kernel that fit in a near cache of a core."""

FEWEST = 4
"""Rows to take at a time at least, even if they make a large kernel."""

KEPT = 1 << 25
"""Bytes from which on the C library returns freed memory to the system."""

AT_ONCE = 1 << 22
"""Bytes to take at a time, where the memory of a padded input is returned. They are of the input, or of the result."""

FEATURES_OF_A_THREAD = 64
"""Features that the fast kernel does not share between threads."""

KERNEL_OF_A_THREAD = 5 << 16
"""Bytes of a kernel that the fast kernel does not share between threads."""

LONG = 1 << 28
"""The fewest multiplications for which two threads are worth the work of joining two halves."""


class ConvolutionSizes(NamedTuple):
    """The sizes of a convolution, in any layout."""

    rows: int
    ins: int
    outs: int
    taps: Shape
    results: Shape
    padded: int
    """Elements of one feature of one row, with padding."""
    weights: int
    is_one_group: bool

    @classmethod
    def from_shapes(cls, x: Shape, w: Shape, params: Params) -> ConvolutionSizes:
        (row, feature, *space), (w_out, _, *w_space), _ = params["dimension_numbers"]
        size = tuple(x[axis] for axis in space)
        taps = tuple(w[axis] for axis in w_space)
        window = Window.of(params)
        is_one_group = params["feature_group_count"] == params["batch_group_count"] == 1
        padded = math.prod(window.padded_size(size))
        return cls(x[row], x[feature], w[w_out], taps, window.results(size, taps), padded, math.prod(w), is_one_group)

    @property
    def is_gradient(self) -> bool:
        """Whether it looks like a gradient by a kernel. Its features are then the rows of the batch."""
        return is_larger(self.taps, self.results)

    @property
    def is_for_one_thread(self) -> bool:
        """Whether the fast kernel would run a long convolution on one thread."""
        batch = self.ins if self.is_gradient else self.rows
        if not self.is_one_group or batch < 2 or self.rows * math.prod(self.results) * self.weights < LONG:
            return False
        return self.outs <= FEATURES_OF_A_THREAD or 4 * self.weights <= KERNEL_OF_A_THREAD

    @property
    def rows_at_once(self) -> int:
        """The number of rows to take at a time.

        It is all of them if the padded copy is small, or if it is no convolution over rows.
        """
        inputs = 4 * self.ins * self.padded
        if not self.is_one_group or self.is_gradient or set(self.taps) == {1} or self.rows * inputs < KEPT:
            return self.rows
        return max(1, min(self.rows, AT_ONCE // max(inputs, 4 * self.outs * math.prod(self.results))))

    @property
    def features_at_once(self) -> int:
        """How many features of a kernel gradient to take at a time. It is all of them for another convolution."""
        if not self.is_one_group or not self.is_gradient:
            return self.ins
        most = max(FEWEST, NEAR // (4 * math.prod(self.taps) * self.outs))
        return math.ceil(self.ins / math.ceil(self.ins / most))


def convolve_two_halves(
    convolve: Callable[[Array, Array], Array], x: Array, w: Array, params: Params, is_gradient: bool
) -> Array:
    """Convolve each half of the batch by one call of `convolve`."""
    (row, feature, *_), (_, w_in, *_), (out, *_) = params["dimension_numbers"]
    axis = feature if is_gradient else row
    count = x.shape[axis]
    sizes = [count - count // 2, count // 2]
    halves = lax.split(x, sizes, axis)
    if is_gradient:
        return lax.add(*map(convolve, halves, lax.split(w, sizes, w_in)))
    return lax.concatenate([convolve(half, w) for half in halves], out)


def convolve_some_rows_at_a_time(convolve: Callable[[Array], Array], x: Array, axes: tuple[int, int], size: int) -> Array:
    """Convolve `size` rows at a time.

    `axes` are the axis of the rows in x, and in the result.
    """
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


def convolve_some_features_at_a_time(
    convolve: Callable[[Array, Array], Array], x: Array, w: Array, axes: tuple[int, int], size: int
) -> Array:
    """Sum the convolutions of `size` features at a time.

    `axes` are the axes of the features in x and in w.
    """
    axis, w_axis = axes

    def convolve_some(start: int | Array, size: int) -> Array:
        return convolve(lax.dynamic_slice_in_dim(x, start, size, axis), lax.dynamic_slice_in_dim(w, start, size, w_axis))

    whole, before_last = divmod(x.shape[axis] - 1, size)
    total = convolve_some(whole * size, before_last + 1)
    return lax.fori_loop(0, whole, lambda number, total: lax.add(total, convolve_some(number * size, size)), total)
