"""Convolutions in which every output feature depends on every input feature, in the layout of the fast kernel."""

from __future__ import annotations

from jax import Array, lax

from unisono._src.xla.rewrite.arrays import pad_array
from unisono._src.xla.rewrite.kernel import Arithmetic, convolve_in_fast_layout
from unisono._src.xla.rewrite.window import Window, is_larger


def convolve_dense(x: Array, w: Array, window: Window, precision: Arithmetic) -> Array:
    """Return the convolution of arrays in the fast layout, in one to three dimensions of space."""
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
    """Return a kernel, reversed, in the layout of an input."""
    space = tuple(range(w.ndim - 2))
    return lax.transpose(lax.rev(w, space), (w.ndim - 1, *space, w.ndim - 2))


def turn_into_kernel(x: Array) -> Array:
    """Return an input, reversed, in the layout of a kernel."""
    space = tuple(range(1, x.ndim - 1))
    return lax.transpose(lax.rev(x, space), (*space, x.ndim - 1, 0))


def convolve_in_two_dimensions(x: Array, w: Array, window: Window, precision: Arithmetic) -> Array:
    """Return a convolution in three dimensions, computed in two.

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
