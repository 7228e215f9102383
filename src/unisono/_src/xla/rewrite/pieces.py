"""Convolutions of some rows of the batch after others, so that what is read stays near, or beside others, for two threads.

The gradient by a kernel, as a convolution, has the gradient of the output for its kernel, and the rows of the batch for
features. XLA's fast kernel takes two to three times as long for 128 rows as for thirty-two times four of them. Threads share
the features of its result and nothing else, so that few features keep one thread busy. And it copies what it pads, to memory
that the C library gives back to the system where it is large, and asks for again: its pages are new each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax

from unisono._src.xla.rewrite.window import Shape, Window, is_larger

NEAR = 1 << 20
"""Bytes of such a kernel that a core has near enough."""

FEWEST = 4
"""Rows to take at a time, however large a kernel they make."""

KEPT = 1 << 25
"""Bytes, from which on the C library keeps no memory that is freed."""

AT_ONCE = 1 << 22
"""Bytes of a padded input that is not kept, or of its result, to take at a time."""

FEATURES_OF_A_THREAD, KERNEL_OF_A_THREAD = 64, 5 << 16
"""Features, and bytes of a kernel, that the fast kernel does not share between threads."""

LONG = 1 << 28
"""Products that are worth two threads: halves are put together again."""


class Sizes(NamedTuple):
    """Of a convolution in whatever layout."""

    rows: int
    ins: int
    outs: int
    space: list[int]
    taps: list[int]
    results: tuple[int, ...]
    window: Window
    is_one_group: bool

    @classmethod
    def of(cls, x: Shape, w: Shape, params: Mapping[str, Any]) -> Sizes:
        (row, feature, *space), (w_out, _, *w_space), _ = params["dimension_numbers"]
        space, taps, window = [x[axis] for axis in space], [w[axis] for axis in w_space], Window.of(params)
        is_one_group = params["feature_group_count"] == params["batch_group_count"] == 1
        return cls(x[row], x[feature], w[w_out], space, taps, window.results(space, taps), window, is_one_group)

    @property
    def is_gradient(self) -> bool:
        """Whether it looks like the gradient by a kernel, whose features are the rows of the batch."""
        return is_larger(self.taps, self.results)


def has_some(x: Shape, w: Shape, params: Mapping[str, Any]) -> bool:
    """Whether a convolution of rows is taken in pieces."""
    return is_for_one_thread(x, w, params) or rows_at_once(x, w, params) < Sizes.of(x, w, params).rows


# Two halves at the same time.


def is_for_one_thread(x: Shape, w: Shape, params: Mapping[str, Any]) -> bool:
    """Whether a convolution is long, and one that the fast kernel does not share between threads."""
    of = Sizes.of(x, w, params)
    batch = of.ins if of.is_gradient else of.rows
    if not of.is_one_group or batch < 2 or of.rows * math.prod(of.results) * math.prod(w) < LONG:
        return False
    return of.outs <= FEATURES_OF_A_THREAD or 4 * math.prod(w) <= KERNEL_OF_A_THREAD


def by_two(convolve: Callable[[Any, Any], Any], x: Any, w: Any, params: Mapping[str, Any]) -> Any:
    """`convolve` of one half of the batch and of the other."""
    (row, feature, *_), (_, w_in, *_), (out, *_) = params["dimension_numbers"]
    if Sizes.of(x.shape, w.shape, params).is_gradient:
        sizes = halves(x.shape[feature])
        return lax.add(*map(convolve, lax.split(x, sizes, feature), lax.split(w, sizes, w_in)))
    return lax.concatenate([convolve(half, w) for half in lax.split(x, halves(x.shape[row]), row)], out)


def halves(count: int) -> list[int]:
    return [count - count // 2, count // 2]


# Some rows, or features, after each other.


def rows_at_once(x: Shape, w: Shape, params: Mapping[str, Any]) -> int:
    """How many rows of a convolution to take at a time; all where its copy is kept, or where it is none of rows."""
    of = Sizes.of(x, w, params)
    inputs = 4 * of.ins * math.prod(of.window.padded(of.space))
    if not of.is_one_group or of.is_gradient or set(of.taps) == {1} or of.rows * inputs < KEPT:
        return of.rows
    return max(1, min(of.rows, AT_ONCE // max(inputs, 4 * of.outs * math.prod(of.results))))


def joined(convolve: Callable[[Any], Any], x: Any, axes: tuple[int, int], size: int) -> Any:
    """`convolve` of so many rows of x after each other, which lie along the first of the axes, and along the second in what it
    gives."""
    axis, of_result = axes
    count = x.shape[axis]

    def put(y: Any, start: Any, size: int) -> Any:
        piece = convolve(lax.dynamic_slice_in_dim(x, start, size, axis))
        return lax.dynamic_update_slice_in_dim(y, piece, start, of_result)

    one = jax.eval_shape(convolve, lax.slice_in_dim(x, 0, 1, axis=axis))
    y = lax.full([count if a == of_result else n for a, n in enumerate(one.shape)], 0, one.dtype)
    whole, rest = divmod(count, size)
    y = lax.fori_loop(0, whole, lambda number, y: put(y, number * size, size), y)
    return put(y, whole * size, rest) if rest else y


def features_at_once(x: Shape, w: Shape, params: Mapping[str, Any]) -> int:
    """How many features of a gradient by a kernel to take at a time; all where it is another convolution."""
    of = Sizes.of(x, w, params)
    if not of.is_one_group or not of.is_gradient:
        return of.ins
    most = max(FEWEST, NEAR // (4 * math.prod(of.taps) * of.outs))
    return math.ceil(of.ins / math.ceil(of.ins / most))


def summed(convolve: Callable[[Any, Any], Any], x: Any, w: Any, axes: tuple[int, int], size: int) -> Any:
    """The sum of `convolve` of so many features of x and w after each other, which lie along these axes."""
    count = x.shape[axes[0]]

    def piece(start: Any, size: int) -> Any:
        return convolve(*(lax.dynamic_slice_in_dim(a, start, size, axis) for a, axis in zip((x, w), axes, strict=True)))

    whole, rest = divmod(count, size)
    total = piece(whole * size, rest) if rest else None
    if total is None:
        whole, total = whole - 1, piece((whole - 1) * size, size)
    return lax.fori_loop(0, whole, lambda number, total: lax.add(total, piece(number * size, size)), total)
