"""Depthwise convolutions by the native kernels, in the fast layout.

Each group has one feature of the input, or one of the output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn

from unisono._src.kernels.convolution.window import Window
from unisono._src.kernels.native.convolutions import call_depthwise, call_depthwise_kernel_gradient
from unisono._src.kernels.native.library import load_kernels
from unisono._src.programs.equations import Params
from unisono._src.programs.operands import get_shape

MOST_PAIRS = 16
"""The most pairs of features of a group: the kernel reads its input once for each."""


def has_depthwise_kernel(eqn: JaxprEqn) -> bool:
    """Whether a native kernel takes a grouped convolution."""
    params = eqn.params
    x, w = map(get_shape, eqn.invars)
    row, feature, *space = params["dimension_numbers"][0]
    by_rows = params["batch_group_count"]
    by_features = params["feature_group_count"]
    ins = x[row] // by_rows if by_rows > 1 else x[feature] // by_features
    outs = w[params["dimension_numbers"][1][0]] // max(by_rows, by_features)
    return (
        max(by_rows, by_features) > 1
        and min(ins, outs) == 1
        and ins * outs <= MOST_PAIRS
        and len(space) <= 2
        and all(atom.aval.dtype == "float32" for atom in [*eqn.invars, *eqn.outvars])
        and (by_rows == 1 or set(params["lhs_dilation"]) == {1})
        and load_kernels().level is not None
    )


def convolve_features(params: Params) -> Callable[[Array, Array, Window], Array]:
    """Choose the function for a convolution that `has_depthwise_kernel` takes. It works on arrays in the fast layout."""
    if params["batch_group_count"] > 1:
        return functools.partial(sum_gradient, groups=params["batch_group_count"])
    return functools.partial(convolve_by_feature, groups=params["feature_group_count"])


def convolve_by_feature(x: Array, w: Array, window: Window, groups: int) -> Array:
    """Convolve groups of features."""
    if len(window.strides) == 1:
        y = convolve_by_feature(lax.expand_dims(x, [1]), lax.expand_dims(w, [0]), window.add_first_dimension(), groups)
        return lax.squeeze(y, [1])
    *taps, ins, features = w.shape
    outs = features // groups
    results = window.results(x.shape[1:-1], taps)
    before = [low for low, _ in window.padding]
    x = jnp.repeat(x, outs, 3)
    w = lax.transpose(w, (0, 1, 3, 2)).reshape(*taps, features * ins)
    y = call_depthwise(x, w, results, window.strides, before, window.dilation, window.spread)
    return y if ins == 1 else y.reshape(*y.shape[:-1], groups, ins).sum(-1)


def sum_gradient(x: Array, w: Array, window: Window, groups: int) -> Array:
    """Compute a gradient by a kernel.

    Here w is the gradient by the output, and the features of x and w are the rows of the batch.
    """
    if len(window.strides) == 1:
        y = sum_gradient(lax.expand_dims(x, [1]), lax.expand_dims(w, [0]), window.add_first_dimension(), groups)
        return lax.squeeze(y, [1])
    ins = x.shape[0] // groups
    outs = w.shape[3] // groups
    before = [low for low, _ in window.padding]
    taps = window.results(x.shape[1:3], w.shape[:2])
    rows = jnp.repeat(lax.transpose(x, (3, 1, 2, 0)), outs, 3)
    gradient = jnp.repeat(lax.transpose(w, (2, 0, 1, 3)), ins, 3)
    y = call_depthwise_kernel_gradient(rows, gradient, taps, window.dilation, before, window.strides)
    return lax.transpose(y.reshape(*taps, groups * outs, ins), (3, 0, 1, 2))
