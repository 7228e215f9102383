"""Convolutions whose groups have few features, as sums of shifted inputs.

There is one term for each position of the kernel. They are computed in float32, as the kernel does, and unrolled. A group's
features are neighbours: (group, in) and (group, out).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from jax import Array, lax
from jax.typing import DTypeLike

from unisono._src.kernels.convolution.window import Window
from unisono._src.kernels.products.arrays import keep_in_memory, multiply_pairwise, pad_array, slice_with_steps

MOST_TAPS = 64
MOST_PAIRS = 4


class FeaturePairs(NamedTuple):
    """The pairs of features of a grouped convolution.

    In each of `groups` groups, `outs` features are made of `ins` features. The result has `dtype`.
    """

    groups: int
    ins: int
    outs: int
    dtype: DTypeLike


def convolve_depthwise(x: Array, w: Array, window: Window, pairs: FeaturePairs) -> Array:
    """Convolve by summing shifted inputs times weights, tap by tap."""
    groups, ins, outs, dtype = pairs
    shape = (x.shape[0], *window.results(x.shape[1:-1], w.shape[:-2]), groups)
    steps = (1, *window.strides, ins)
    x = pad_input(x, window)
    w = w.astype("float32")
    results = []
    for out in range(outs):
        terms = []
        for *tap, feature in itertools.product(*map(range, w.shape[:-1])):
            shifted = slice_with_steps(x, (0, *multiply_pairwise(tap, window.dilation), feature), shape, steps)
            ones = (1,) * (w.ndim - 1)
            weight = slice_with_steps(w, (*tap, feature, out), (*ones, groups), (*ones, outs))
            terms.append(shifted * lax.broadcast_in_dim(weight.reshape(groups), shape, [x.ndim - 1]))
        results.append(functools.reduce(operator.add, terms))
    return join_features(results, dtype)


def compute_kernel_gradient(x: Array, dy: Array, window: Window, pairs: FeaturePairs) -> Array:
    """Compute the gradient of `convolve_depthwise` by its kernel.

    Each position is a sum of products. Rows of x are (group, in).
    """
    groups, ins, outs, dtype = pairs
    last = x.ndim - 1
    positions = window.results(x.shape[1:-1], dy.shape[:-2])
    x = lax.transpose(pad_input(x, window), (last, *range(1, last), 0))
    dy = lax.transpose(dy.astype("float32"), (last - 1, *range(last - 1), last))
    shape = (*dy.shape[:-1], groups)
    products = []
    for out, feature, *position in itertools.product(range(outs), range(ins), *map(range, positions)):
        shifted = slice_with_steps(
            x, (0, *multiply_pairwise(position, window.strides), feature), shape, (1, *window.dilation, ins)
        )
        products.append(shifted * slice_with_steps(dy, (0,) * last + (out,), shape, (1,) * last + (outs,)))
    sums = lax.concatenate([lax.expand_dims(total, [0]) for total in sum_products(products)], 0)
    sums = sums.reshape(outs, ins, *positions, groups)
    return join_features([lax.index_in_dim(sums, out, 0, keepdims=False) for out in range(outs)], dtype)


def sum_products(products: Sequence[Array]) -> list[Array]:
    """Sum each elementwise product over all dimensions but the groups.

    All are summed over space in one pass, then each over rows.
    """

    def add(totals: Sequence[Array], terms: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(map(operator.add, totals, terms))

    zeros = (lax.full((), 0, "float32"),) * len(products)
    over_space = lax.reduce(tuple(products), zeros, add, range(1, products[0].ndim - 1))
    return [lax.reduce(total, zeros[0], lax.add, [0]) for total in over_space]


def pad_input(x: Array, window: Window) -> Array:
    """Pad the input, spread its elements, and keep it as float32."""
    space = [(low, high, spread - 1) for (low, high), spread in zip(window.padding, window.spread, strict=True)]
    return keep_in_memory(pad_array(x.astype("float32"), 0, [(0, 0, 0), *space, (0, 0, 0)]))


def join_features(results: Sequence[Array], dtype: DTypeLike) -> Array:
    """Join one array for each out to features (group, out)."""
    y = lax.concatenate([lax.expand_dims(result, [result.ndim]) for result in results], results[0].ndim)
    return y.reshape(*y.shape[:-2], -1).astype(dtype)
