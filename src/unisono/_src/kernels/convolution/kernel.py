"""Convolutions in the form that XLA:CPU runs fast.

Their bits are the same for every number of threads: see `contraction`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from jax import Array, lax
from jax.typing import DTypeLike

from unisono._src.kernels.convolution.window import Window, is_larger
from unisono._src.kernels.products.arrays import pad_array
from unisono._src.programs.equations import Params
from unisono._src.typing import Shape

LEAST_FEATURES = 17
"""YNNPACK takes a convolution in which the input or the result has this many features."""

NEAR = 1 << 14
"""Bytes of a row of the input that fit in the nearest cache of a core."""

WIDE = 32
"""Features that a result is filled up to for YNNPACK; 17 would be enough, but are slower."""


Convolve = Callable[[Array, Array, Window], Array]
"""Computes the convolution of arrays in the fast layout."""


class Arithmetic(NamedTuple):
    """The arithmetic of a convolution. `result` is its "preferred" type."""

    precision: lax.PrecisionLike
    result: DTypeLike | None


def make_channels_last(space: int) -> lax.ConvDimensionNumbers:
    """The dimension numbers of the fast layout.

    It has x as (rows, *space, features), w as (*space, in, out), and the result as (rows, *space, features).
    """
    axes = tuple(range(1, space + 1))
    last = space + 1
    return lax.ConvDimensionNumbers((0, last, *axes), (last, last - 1, *range(space)), (0, last, *axes))


def convolve_with_features_last(compute: Convolve, x: Array, w: Array, params: Params) -> Array:
    """Run `compute` in the fast layout, and transpose back."""
    (row, feature, *space), (w_out, w_in, *w_space), out = params["dimension_numbers"]
    y = compute(lax.transpose(x, (row, *space, feature)), lax.transpose(w, (*w_space, w_in, w_out)), Window.of(params))
    places = {out[0]: 0, out[1]: y.ndim - 1, **{dimension: 1 + index for index, dimension in enumerate(out[2:])}}
    return lax.transpose(y, [places[dimension] for dimension in range(y.ndim)])


def convolve_dense(x: Array, w: Array, window: Window, precision: Arithmetic) -> Array:
    """Convolve in the fast layout, in one to three dimensions of space."""
    space = x.shape[1:-1]
    kernel = w.shape[:-2]
    if len(space) == 3:
        return convolve_in_two_dimensions(x, w, window, precision)
    if not is_larger(kernel, space):
        return convolve_in_fast_layout(x, w, window, precision)
    # XLA would swap the operands too, but not into the fast layout.
    y = convolve_in_fast_layout(turn_into_input(w), turn_into_kernel(x), window.swap_operands(space, kernel), precision)
    return lax.transpose(y, (y.ndim - 1, *range(1, y.ndim - 1), 0))


def turn_into_input(w: Array) -> Array:
    """Reverse a kernel and give it the layout of an input."""
    space = tuple(range(w.ndim - 2))
    return lax.transpose(lax.rev(w, space), (w.ndim - 1, *space, w.ndim - 2))


def turn_into_kernel(x: Array) -> Array:
    """Reverse an input and give it the layout of a kernel."""
    space = tuple(range(1, x.ndim - 1))
    return lax.transpose(lax.rev(x, space), (*space, x.ndim - 1, 0))


def convolve_in_two_dimensions(x: Array, w: Array, window: Window, precision: Arithmetic) -> Array:
    """Compute a convolution in three dimensions by ones in two.

    The kernel's depth joins the features: for all output depths at once or, if there are fewer of them than taps, for one after another.
    """
    depth = window.results(x.shape[1:-1], w.shape[:-2])[0]
    taps = w.shape[0]
    step = window.strides[0]
    gap = window.dilation[0]
    plane = window.drop_first_dimension()
    x = pad_array(x, 0, [(0, 0, 0), (*window.padding[0], window.spread[0] - 1), *[(0, 0, 0)] * 3])
    w = lax.transpose(w, (1, 2, 0, 3, 4))
    w = w.reshape(*w.shape[:2], -1, w.shape[-1])
    if taps <= depth:
        reach = (depth - 1) * step + 1
        x = lax.concatenate([lax.slice_in_dim(x, tap * gap, tap * gap + reach, step, 1) for tap in range(taps)], 4)
        y = convolve_dense(x.reshape(-1, *x.shape[2:]), w, plane, precision)
        return y.reshape(-1, depth, *y.shape[1:])
    reach = (taps - 1) * gap + 1
    slabs = [lax.slice_in_dim(x, at * step, at * step + reach, gap, 1) for at in range(depth)]
    slabs = [lax.transpose(slab, (0, 2, 3, 1, 4)) for slab in slabs]
    planes = [convolve_dense(slab.reshape(*slab.shape[:3], -1), w, plane, precision) for slab in slabs]
    return lax.concatenate([lax.expand_dims(y, [1]) for y in planes], 1)


def convolve_in_fast_layout(x: Array, w: Array, window: Window, precision: Arithmetic, groups: int = 1) -> Array:
    """Convolve in the fast layout, in one or two dimensions of space."""
    if len(window.strides) == 1:  # YNNPACK takes two dimensions
        y = convolve_in_fast_layout(
            lax.expand_dims(x, [1]), lax.expand_dims(w, [0]), window.add_first_dimension(), precision, groups
        )
        return lax.squeeze(y, [1])
    if set(window.spread) != {1}:
        x, window = spread_beforehand(x, window)
    if is_cut_away(x.shape, window):
        x, window = pad_beforehand(x, window)
    outs = w.shape[-1]
    if groups == 1 and is_left_to_eigen(x.shape, w.shape, window):
        if has_larger_result(x.shape, w.shape, window):
            x, window = pad_beforehand(x, window)
        if is_narrow(w.shape):
            w = pad_array(w, 0, [(0, 0, 0)] * (w.ndim - 1) + [(0, WIDE - outs, 0)])
    results = window.results(x.shape[1:-1], w.shape[:-2])
    if groups == 1 and is_slow_without_padding(x.shape, w.shape, window):
        window = add_padded_row(w.shape, window, results)
    y = lax.conv_general_dilated(
        x,
        w,
        **window.params,
        dimension_numbers=make_channels_last(len(window.strides)),
        feature_group_count=groups,
        precision=precision.precision,
        preferred_element_type=precision.result,
    )
    return lax.slice(y, [0] * y.ndim, (y.shape[0], *results, outs))


def is_slow_without_padding(x: Shape, w: Shape, window: Window) -> bool:
    """Whether padding would make a convolution faster.

    YNNPACK copies an input that it pads, piece by piece, to memory that it reads fast. An input without padding is read in place, which
    takes up to four times as long, unless the kernel goes over few elements.
    """
    if any(map(any, window.padding)) or set(window.spread) != {1}:
        return False
    results = window.results(x[1:-1], w[:-2])
    return any(taps > 1 and count > 1 for taps, count in zip(w[:-2], results, strict=True)) and 4 * math.prod(x[1:]) >= NEAR


def add_padded_row(w: Shape, window: Window, results: Shape) -> Window:
    """Pad the window so that one more row of results is computed.

    Nobody reads it. It lies along the dimension with the most results.
    """
    negative_axis = max((count, -axis) for axis, (count, taps) in enumerate(zip(results, w[:-2], strict=True)) if taps > 1)[1]
    padding = tuple((0, int(axis == -negative_axis)) for axis in range(len(results)))
    return dataclasses.replace(window, padding=padding)


def is_left_to_eigen(x: Shape, w: Shape, window: Window) -> bool:
    """Whether YNNPACK rejects a convolution in two dimensions. Eigen would compute it, and cuts it by the number of threads."""
    return is_narrow(w) or has_larger_result(x, w, window)


def is_narrow(w: Shape) -> bool:
    return max(w[-2:]) < LEAST_FEATURES


def has_larger_result(x: Shape, w: Shape, window: Window) -> bool:
    """Whether the padding makes the result larger than the input."""
    return any(after > before for before, after in zip(x[1:-1], window.results(x[1:-1], w[:-2]), strict=True))


def is_cut_away(x: Shape, window: Window) -> bool:
    """Whether negative padding leaves nothing of the input.

    Only zeros are read then, and such a convolution ends the process in YNNPACK.
    """
    return any(size + min(low, 0) + min(high, 0) <= 0 for size, (low, high) in zip(x[1:-1], window.padding, strict=True))


def spread_beforehand(x: Array, window: Window) -> tuple[Array, Window]:
    """Put the zeros between the input's elements beforehand.

    No fast kernel adds such zeros. The barrier keeps XLA from folding them back.
    """
    x = lax.optimization_barrier(pad_array(x, 0, [(0, 0, 0), *((0, 0, spread - 1) for spread in window.spread), (0, 0, 0)]))
    return x, dataclasses.replace(window, spread=(1,) * len(window.spread))


def pad_beforehand(x: Array, window: Window) -> tuple[Array, Window]:
    """Pad the input beforehand. The barrier keeps XLA from folding the padding back into the convolution."""
    x = lax.optimization_barrier(pad_array(x, 0, [(0, 0, 0), *((low, high, 0) for low, high in window.padding), (0, 0, 0)]))
    return x, dataclasses.replace(window, padding=((0, 0),) * len(window.padding))
