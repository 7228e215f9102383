"""Convolutions in the forms that XLA:CPU runs fast, in loops too.

The fast kernel takes (rows, *space, features) and (*space, in, out). XLA brings convolutions to that layout in the entry
computation only, never in a loop's body. The two gradient convolutions are not in that layout, and a forward convolution leaves
it if XLA swaps input and kernel. The kernel is slow for groups, for inputs with zeros between their elements, and in three
dimensions. So groups become sums of elementwise products or one convolution for each group, spread inputs become phases, and
three dimensions become two.
"""

from __future__ import annotations

import functools
import math

from jax import Array, lax
from jax.extend.core import JaxprEqn

from unisono._src.kernels.convolution import depthwise, pieces
from unisono._src.kernels.convolution.kernel import (
    Arithmetic,
    Convolve,
    convolve_dense,
    convolve_in_fast_layout,
    convolve_with_features_last,
    is_left_to_eigen,
    is_slow_without_padding,
    make_channels_last,
)
from unisono._src.kernels.convolution.native_convolution import has_native_kernel, replace_by_native_kernels
from unisono._src.kernels.convolution.native_depthwise import convolve_features, has_depthwise_kernel
from unisono._src.kernels.convolution.pieces import ConvolutionSizes
from unisono._src.kernels.convolution.window import Window, convolve_in_phases, has_phases, is_larger
from unisono._src.programs.equations import Params, Producers, Replacement
from unisono._src.programs.operands import get_shape
from unisono._src.typing import Shape

MOST_GROUPS = 64
"""Groups with a convolution for each; more groups are left to the kernel, which is slow for them but faster than XLA's other one."""


def replace_convolution(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace a convolution in one to three dimensions, unless it is fast."""
    params = eqn.params
    x, w = map(get_shape, eqn.invars)
    if not 1 <= len(params["window_strides"]) <= 3:
        return None
    sizes = ConvolutionSizes.from_shapes(x, w, params)
    if has_depthwise_kernel(eqn):
        return Replacement(lambda x, w: convolve_with_features_last(convolve_features(params), x, w, params), eqn.invars)
    if has_native_kernel(eqn, sizes):
        return replace_by_native_kernels(eqn, made_by)
    is_at_once = not sizes.is_for_one_thread and sizes.rows_at_once == sizes.rows
    if is_at_once and is_fast_convolution(params, x, w):
        return None
    return Replacement(lambda x, w: compute_convolution(x, w, params, sizes), eqn.invars)


def is_fast_convolution(params: Params, x: Shape, w: Shape) -> bool:
    """Whether the fast kernel takes a convolution as it is."""
    space = len(params["window_strides"])
    is_grouped = params["feature_group_count"] > 1 or params["batch_group_count"] > 1
    is_spread = any(distance > 1 for distance in params["lhs_dilation"])
    if (
        is_grouped
        or is_spread
        or space != 2
        or params["dimension_numbers"] != make_channels_last(space)
        or is_larger(w[:-2], x[1:-1])
    ):
        return False
    window = Window.of(params)
    return not (is_left_to_eigen(x, w, window) or is_slow_without_padding(x, w, window))


def compute_convolution(x: Array, w: Array, params: Params, sizes: ConvolutionSizes) -> Array:
    """Compute what `conv_general_dilated` does with these parameters."""
    if not x.dtype == w.dtype == "float32":
        return convolve_at_once(x, w, params)
    if not sizes.is_for_one_thread:
        return convolve_in_pieces(x, w, params, sizes)

    def convolve_half(x: Array, w: Array) -> Array:
        return convolve_in_pieces(x, w, params, ConvolutionSizes.from_shapes(x.shape, w.shape, params))

    return pieces.convolve_two_halves(convolve_half, x, w, params, sizes.is_gradient)


def convolve_in_pieces(x: Array, w: Array, params: Params, sizes: ConvolutionSizes) -> Array:
    """Convolve some features or rows at a time, where that is faster."""
    (row, feature, *_), (_, w_in, *_), (out, *_) = params["dimension_numbers"]
    at_once = functools.partial(convolve_at_once, params=params)
    if sizes.features_at_once < sizes.ins:
        return pieces.convolve_some_features_at_a_time(at_once, x, w, (feature, w_in), sizes.features_at_once)
    if sizes.rows_at_once < sizes.rows:
        return pieces.convolve_some_rows_at_a_time(functools.partial(at_once, w=w), x, (row, out), sizes.rows_at_once)
    return at_once(x, w)


def convolve_at_once(x: Array, w: Array, params: Params) -> Array:
    """Convolve in the fast layout, in one piece."""
    precision = Arithmetic(params["precision"], params["preferred_element_type"])
    if params["batch_group_count"] > 1:
        compute = functools.partial(convolve_groups, precision=precision, groups=params["batch_group_count"], by_rows=True)
    elif params["feature_group_count"] > 1:
        compute = functools.partial(convolve_groups, precision=precision, groups=params["feature_group_count"], by_rows=False)
    else:
        compute = functools.partial(convolve_one_group, convolve=functools.partial(convolve_dense, precision=precision))
    return convolve_with_features_last(compute, x, w, params)


def convolve_one_group(x: Array, w: Array, window: Window, convolve: Convolve) -> Array:
    return convolve_in_phases(convolve, x, w, window) if has_phases(window) else convolve(x, w, window)


def convolve_groups(x: Array, w: Array, window: Window, precision: Arithmetic, groups: int, by_rows: bool) -> Array:
    """Convolve by groups. They lie among the features of x (the forward pass) or its rows (a gradient by the kernel)."""
    axis = 0 if by_rows else x.ndim - 1
    ins = x.shape[axis] // groups
    outs = w.shape[-1] // groups
    unrolled = window.results(x.shape[1:-1], w.shape[:-2]) if by_rows else w.shape[:-2]
    if ins * outs <= depthwise.MOST_PAIRS and math.prod(unrolled) <= depthwise.MOST_TAPS:
        pairs = depthwise.FeaturePairs(groups, ins, outs, precision.result or x.dtype)
        return (depthwise.compute_kernel_gradient if by_rows else depthwise.convolve_depthwise)(x, w, window, pairs)
    if groups <= MOST_GROUPS:
        convolve = functools.partial(convolve_dense, precision=precision)
        parts = zip(lax.split(x, [ins] * groups, axis), lax.split(w, [outs] * groups, w.ndim - 1), strict=True)
        return lax.concatenate([convolve_one_group(part, kernel, window, convolve) for part, kernel in parts], x.ndim - 1)
    return convolve_in_fast_layout(move_groups_to_features(x, groups) if by_rows else x, w, window, precision, groups)


def move_groups_to_features(x: Array, groups: int) -> Array:
    """Move the groups of x from its rows to its features."""
    rows, *space, features = x.shape
    by_group = x.reshape(groups, rows // groups, *space, features)
    return lax.transpose(by_group, (*range(1, x.ndim), 0, x.ndim)).reshape(rows // groups, *space, groups * features)
