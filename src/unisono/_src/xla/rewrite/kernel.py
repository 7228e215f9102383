"""One convolution as XLA:CPU runs it fast, and with the same bits for every pool of threads: see `contraction`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from jax import lax

from unisono._src.xla.rewrite.arrays import padded
from unisono._src.xla.rewrite.window import Shape, Window

LEAST_FEATURES = 17
"""YNNPACK takes a convolution in which the input or the result has so many features."""

NEAR = 1 << 14
"""Bytes of a row of the input that a core has nearest."""

WIDE = 32
"""Features that a result is filled up to for it; 17 would do, but are slower."""


class Precision(NamedTuple):
    """What a convolution asks of its arithmetic; `result` is its "preferred" type."""

    precision: Any
    result: Any


def channels_last(space: int) -> lax.ConvDimensionNumbers:
    """The fast layout: x as (rows, *space, features), w as (*space, in, out), the result as (rows, *space, features)."""
    places, last = tuple(range(1, space + 1)), space + 1
    return lax.ConvDimensionNumbers((0, last, *places), (last, last - 1, *range(space)), (0, last, *places))


def convolved(x: Any, w: Any, window: Window, precision: Precision, groups: int = 1) -> Any:
    """The convolution of arrays that lie in the fast layout."""
    if len(window.strides) == 1:  # YNNPACK takes two dimensions
        y = convolved(lax.expand_dims(x, [1]), lax.expand_dims(w, [0]), window.with_first(), precision, groups)
        return lax.squeeze(y, [1])
    if set(window.spread) != {1}:
        x, window = already_spread(x, window)
    if is_cut_away(x.shape, window):
        x, window = already_padded(x, window)
    outs = w.shape[-1]
    if groups == 1 and is_left_to_eigen(x.shape, w.shape, window):
        if grows(x.shape, w.shape, window):
            x, window = already_padded(x, window)
        if is_narrow(w.shape):
            w = padded(w, 0, [(0, 0, 0)] * (w.ndim - 1) + [(0, WIDE - outs, 0)])
    results = window.results(x.shape[1:-1], w.shape[:-2])
    if groups == 1 and is_slow_without_padding(x.shape, w.shape, window):
        window = padded_once(w.shape, window, results)
    y = lax.conv_general_dilated(
        x,
        w,
        **window.params,
        dimension_numbers=channels_last(len(window.strides)),
        feature_group_count=groups,
        precision=precision.precision,
        preferred_element_type=precision.result,
    )
    return lax.slice(y, [0] * y.ndim, (y.shape[0], *results, outs))


def is_slow_without_padding(x: Shape, w: Shape, window: Window) -> bool:
    """YNNPACK copies what it pads, piece by piece, to where it reads fast. What needs no padding it reads where it lies, which
    takes up to four times as long, unless the kernel goes over little."""
    if any(map(any, window.padding)) or set(window.spread) != {1}:
        return False
    results = window.results(x[1:-1], w[:-2])
    return any(taps > 1 and n > 1 for taps, n in zip(w[:-2], results, strict=True)) and 4 * math.prod(x[1:]) >= NEAR


def padded_once(w: Shape, window: Window, results: Shape) -> Window:
    """With one more row of results, if any, along the dimension that has most of them; nobody reads it."""
    axis = max((n, -axis) for axis, (n, taps) in enumerate(zip(results, w[:-2], strict=True)) if taps > 1)[1]
    padding = tuple((0, int(place == -axis)) for place in range(len(results)))
    return dataclasses.replace(window, padding=padding)


def is_left_to_eigen(x: Shape, w: Shape, window: Window) -> bool:
    """Whether YNNPACK does not take a convolution in two dimensions as it is. Eigen would, and cuts it by the number of threads."""
    return is_narrow(w) or grows(x, w, window)


def is_narrow(w: Shape) -> bool:
    return max(w[-2:]) < LEAST_FEATURES


def grows(x: Shape, w: Shape, window: Window) -> bool:
    """Whether the padding makes a result larger than the input."""
    return any(after > before for before, after in zip(x[1:-1], window.results(x[1:-1], w[:-2]), strict=True))


def is_cut_away(x: Shape, window: Window) -> bool:
    """Whether negative padding leaves nothing of the input, and only zeros are read. YNNPACK ends the process over it."""
    return any(n + min(low, 0) + min(high, 0) <= 0 for n, (low, high) in zip(x[1:-1], window.padding, strict=True))


def already_spread(x: Any, window: Window) -> tuple[Any, Window]:
    """The input with its zeros between the elements, which no fast kernel takes otherwise, behind a barrier."""
    x = lax.optimization_barrier(padded(x, 0, [(0, 0, 0), *((0, 0, spread - 1) for spread in window.spread), (0, 0, 0)]))
    return x, dataclasses.replace(window, spread=(1,) * len(window.spread))


def already_padded(x: Any, window: Window) -> tuple[Any, Window]:
    """The input padded beforehand, behind a barrier, since XLA would fold the padding back into the convolution."""
    x = lax.optimization_barrier(padded(x, 0, [(0, 0, 0), *((low, high, 0) for low, high in window.padding), (0, 0, 0)]))
    return x, dataclasses.replace(window, padding=((0, 0),) * len(window.padding))
