"""Convolutions whose groups have few features, without a kernel: sums over the kernel's positions of shifted inputs.

Computed in float32, as the kernel does, and unrolled. A group's features are neighbours: (group, in) and (group, out).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax

from unisono._src.xla.rewrite.arrays import kept, padded, scaled, strided
from unisono._src.xla.rewrite.window import Window

MOST_TAPS = 64
MOST_PAIRS = 4


class Pairs(NamedTuple):
    """In each of `groups` groups, `outs` features are made of `ins` features; the result has `dtype`."""

    groups: int
    ins: int
    outs: int
    dtype: Any


def forward(x: Any, w: Any, window: Window, pairs: Pairs) -> Any:
    groups, ins, outs, dtype = pairs
    shape = (x.shape[0], *window.results(x.shape[1:-1], w.shape[:-2]), groups)
    steps = (1, *window.strides, ins)
    x, w = laid_out(x, window), w.astype("float32")
    results = []
    for out in range(outs):
        terms = []
        for *tap, feature in itertools.product(*map(range, w.shape[:-1])):
            seen = strided(x, (0, *scaled(tap, window.dilation), feature), shape, steps)
            ones = (1,) * (w.ndim - 1)
            weight = strided(w, (*tap, feature, out), (*ones, groups), (*ones, outs))
            terms.append(seen * lax.broadcast_in_dim(weight.reshape(groups), shape, [x.ndim - 1]))
        results.append(functools.reduce(operator.add, terms))
    return by_group(results, dtype)


def gradient(x: Any, dy: Any, window: Window, pairs: Pairs) -> Any:
    """The gradient of `forward` by its kernel: for each position, a sum of products. Rows of x are (group, in)."""
    groups, ins, outs, dtype = pairs
    last, positions = x.ndim - 1, window.results(x.shape[1:-1], dy.shape[:-2])
    x = lax.transpose(laid_out(x, window), (last, *range(1, last), 0))
    dy = lax.transpose(dy.astype("float32"), (last - 1, *range(last - 1), last))
    shape, products = (*dy.shape[:-1], groups), []
    for out, feature, *place in itertools.product(range(outs), range(ins), *map(range, positions)):
        seen = strided(x, (0, *scaled(place, window.strides), feature), shape, (1, *window.dilation, ins))
        products.append(seen * strided(dy, (0,) * last + (out,), shape, (1,) * last + (outs,)))
    sums = lax.concatenate([lax.expand_dims(total, [0]) for total in totals(products)], 0)
    sums = sums.reshape(outs, ins, *positions, groups)
    return by_group([lax.index_in_dim(sums, out, 0, keepdims=False) for out in range(outs)], dtype)


def totals(products: Sequence[Any]) -> list[Any]:
    """Each summed over all but its groups: over space all of them in one pass over the arrays, then over rows."""

    def add(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(operator.add, a, b))

    zeros = (lax.full((), 0, "float32"),) * len(products)
    over_space = lax.reduce(tuple(products), zeros, add, range(1, products[0].ndim - 1))
    return [lax.reduce(total, zeros[0], lax.add, [0]) for total in over_space]


def laid_out(x: Any, window: Window) -> Any:
    space = [(low, high, spread - 1) for (low, high), spread in zip(window.padding, window.spread, strict=True)]
    return kept(padded(x.astype("float32"), 0, [(0, 0, 0), *space, (0, 0, 0)]))


def by_group(results: Sequence[Any], dtype: Any) -> Any:
    """Features as (group, out), of one array an out."""
    y = lax.concatenate([lax.expand_dims(result, [result.ndim]) for result in results], results[0].ndim)
    return y.reshape(*y.shape[:-2], -1).astype(dtype)
