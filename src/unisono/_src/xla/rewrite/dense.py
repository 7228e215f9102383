"""Convolutions in which every output feature sees every input feature, in the layout of the fast kernel."""

from __future__ import annotations

from typing import Any

from jax import lax

from unisono._src.xla.rewrite.arrays import padded
from unisono._src.xla.rewrite.kernel import Precision, convolved
from unisono._src.xla.rewrite.window import Window, is_larger


def dense(x: Any, w: Any, window: Window, precision: Precision) -> Any:
    space, kernel = x.shape[1:-1], w.shape[:-2]
    if len(space) == 3:
        return in_two_dimensions(x, w, window, precision)
    if not is_larger(kernel, space):
        return convolved(x, w, window, precision)
    # As XLA would swap them, but into the fast layout.
    y = convolved(as_input(w), as_kernel(x), window.swapped(space, kernel), precision)
    return lax.transpose(y, (y.ndim - 1, *range(1, y.ndim - 1), 0))


def as_input(w: Any) -> Any:
    space = tuple(range(w.ndim - 2))
    return lax.transpose(lax.rev(w, space), (w.ndim - 1, *space, w.ndim - 2))


def as_kernel(x: Any) -> Any:
    space = tuple(range(1, x.ndim - 1))
    return lax.transpose(lax.rev(x, space), (*space, x.ndim - 1, 0))


def in_two_dimensions(x: Any, w: Any, window: Window, precision: Precision) -> Any:
    """The kernel's depth joins the features: for all output depths at once or, where they are fewer, one after another."""
    depth, taps = window.results(x.shape[1:-1], w.shape[:-2])[0], w.shape[0]
    step, gap, plane = window.strides[0], window.dilation[0], window.without_first()
    x = padded(x, 0, [(0, 0, 0), (*window.padding[0], window.spread[0] - 1), *[(0, 0, 0)] * 3])
    w = lax.transpose(w, (1, 2, 0, 3, 4))
    w = w.reshape(*w.shape[:2], -1, w.shape[-1])
    if taps <= depth:
        reach = (depth - 1) * step + 1
        x = lax.concatenate([lax.slice_in_dim(x, tap * gap, tap * gap + reach, step, 1) for tap in range(taps)], 4)
        y = dense(x.reshape(-1, *x.shape[2:]), w, plane, precision)
        return y.reshape(-1, depth, *y.shape[1:])
    reach = (taps - 1) * gap + 1
    seen = [lax.slice_in_dim(x, at * step, at * step + reach, gap, 1) for at in range(depth)]
    seen = [lax.transpose(part, (0, 2, 3, 1, 4)) for part in seen]
    planes = [dense(part.reshape(*part.shape[:3], -1), w, plane, precision) for part in seen]
    return lax.concatenate([lax.expand_dims(y, [1]) for y in planes], 1)
