"""Convolutions in the forms that XLA:CPU runs fast, in loops too.

Its fast kernel takes (rows, *space, features) and (*space, in, out). XLA brings convolutions to that layout in the entry
computation only, never in a loop's body; the two gradient convolutions are not in that layout, and a forward convolution
leaves it where XLA swaps input and kernel. The kernel is slow for groups, for inputs with zeros between their elements and in
three dimensions, so those become sums of products, one convolution a group, phases, two dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from unisono._src.xla.rewrite import depthwise, pieces
from unisono._src.xla.rewrite.dense import dense
from unisono._src.xla.rewrite.equations import MadeBy, Replacement, shape
from unisono._src.xla.rewrite.kernel import Precision, channels_last, convolved, is_left_to_eigen, is_slow_without_padding
from unisono._src.xla.rewrite.phases import has_phases, in_phases
from unisono._src.xla.rewrite.window import Shape, Window, is_larger

MOST_GROUPS = 64
"""A convolution for each group; more are left to the kernel, which takes long for them but less than XLA's other one."""


def rule(eqn: JaxprEqn, _: MadeBy) -> Replacement | None:
    params = eqn.params
    x, w = map(shape, eqn.invars)
    if not 1 <= len(params["window_strides"]) <= 3 or (is_fast(params, x, w) and not pieces.has_some(x, w, params)):
        return None

    return Replacement(lambda x, w: convolve(x, w, params), eqn.invars)


def is_fast(params: Mapping[str, Any], x: Shape, w: Shape) -> bool:
    """Whether a convolution is left as it is."""
    space = len(params["window_strides"])
    grouped = params["feature_group_count"] > 1 or params["batch_group_count"] > 1
    spread = any(n > 1 for n in params["lhs_dilation"])
    if grouped or spread or space != 2 or params["dimension_numbers"] != channels_last(space) or is_larger(w[:-2], x[1:-1]):
        return False
    window = Window.of(params)
    return not (is_left_to_eigen(x, w, window) or is_slow_without_padding(x, w, window))


def convolve(x: Any, w: Any, params: Mapping[str, Any]) -> Any:
    """`conv_general_dilated` of `params`."""
    if not x.dtype == w.dtype == "float32":
        return convolved_at_once(x, w, params)
    if pieces.is_for_one_thread(x.shape, w.shape, params):
        return pieces.by_two(lambda x, w: convolved_in_pieces(x, w, params), x, w, params)
    return convolved_in_pieces(x, w, params)


def convolved_in_pieces(x: Any, w: Any, params: Mapping[str, Any]) -> Any:
    (row, feature, *_), (_, w_in, *_), (out, *_) = params["dimension_numbers"]
    size = pieces.features_at_once(x.shape, w.shape, params)
    if size < x.shape[feature]:
        return pieces.summed(lambda x, w: convolved_at_once(x, w, params), x, w, (feature, w_in), size)
    size = pieces.rows_at_once(x.shape, w.shape, params)
    if size < x.shape[row]:
        return pieces.joined(lambda x: convolved_at_once(x, w, params), x, (row, out), size)
    return convolved_at_once(x, w, params)


def convolved_at_once(x: Any, w: Any, params: Mapping[str, Any]) -> Any:
    (row, feature, *space), (w_out, w_in, *w_space), out = params["dimension_numbers"]
    x = lax.transpose(x, (row, *space, feature))
    w = lax.transpose(w, (*w_space, w_in, w_out))
    window, precision = Window.of(params), Precision(params["precision"], params["preferred_element_type"])
    if params["batch_group_count"] > 1:
        y = grouped(x, w, window, precision, params["batch_group_count"], 0)
    elif params["feature_group_count"] > 1:
        y = grouped(x, w, window, precision, params["feature_group_count"], x.ndim - 1)
    else:
        y = one_group(x, w, window, precision)
    place = {out[0]: 0, out[1]: y.ndim - 1, **{dimension: 1 + i for i, dimension in enumerate(out[2:])}}
    return lax.transpose(y, [place[dimension] for dimension in range(y.ndim)])


def one_group(x: Any, w: Any, window: Window, precision: Precision) -> Any:
    if has_phases(window):
        return in_phases(lambda x, w, window: dense(x, w, window, precision), x, w, window)
    return dense(x, w, window, precision)


def grouped(x: Any, w: Any, window: Window, precision: Precision, groups: int, axis: int) -> Any:
    """x has its groups in `axis`: among features (the forward pass) or rows (a gradient by the kernel)."""
    ins, outs = x.shape[axis] // groups, w.shape[-1] // groups
    by_rows = axis == 0
    unrolled = window.results(x.shape[1:-1], w.shape[:-2]) if by_rows else w.shape[:-2]
    if ins * outs <= depthwise.MOST_PAIRS and math.prod(unrolled) <= depthwise.MOST_TAPS:
        pairs = depthwise.Pairs(groups, ins, outs, precision.result or x.dtype)
        return (depthwise.gradient if by_rows else depthwise.forward)(x, w, window, pairs)
    if groups <= MOST_GROUPS:
        parts = zip(lax.split(x, [ins] * groups, axis), lax.split(w, [outs] * groups, w.ndim - 1), strict=True)
        return lax.concatenate([one_group(a, b, window, precision) for a, b in parts], x.ndim - 1)
    return convolved(features_grouped(x, groups) if by_rows else x, w, window, precision, groups)


def features_grouped(x: Any, groups: int) -> Any:
    """Groups of rows, as groups of features."""
    rows, *space, features = x.shape
    by_group = x.reshape(groups, rows // groups, *space, features)
    return lax.transpose(by_group, (*range(1, x.ndim), 0, x.ndim)).reshape(rows // groups, *space, groups * features)
