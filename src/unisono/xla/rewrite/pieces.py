"""The gradient by a kernel, some rows of the batch after others, so that what it reads stays in the cache.

As a convolution it has the gradient of the output for its kernel, and the rows of the batch for features. XLA's fast kernel
takes about twice as long for 128 rows as for sixteen times eight of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jax import lax

from unisono.xla.rewrite.window import Window, is_larger

NEAR = 1 << 20
"""Bytes of such a kernel that a core has near enough."""

FEWEST = 8
"""Rows, which the fast kernel takes together."""


def features_at_once(x: tuple[int, ...], w: tuple[int, ...], params: Mapping[str, Any]) -> int:
    """How many features of such a convolution to take at a time; all where it is another."""
    (_, feature, *space), (w_out, w_in, *w_space), _ = params["dimension_numbers"]
    taps = [w[axis] for axis in w_space]
    results = Window.of(params).results([x[axis] for axis in space], taps)
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1 or not is_larger(taps, results):
        return x[feature]
    most = max(FEWEST, NEAR // (4 * math.prod(taps) * w[w_out]))
    return math.ceil(w[w_in] / math.ceil(w[w_in] / most))


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
