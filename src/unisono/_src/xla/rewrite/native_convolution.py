"""Convolutions by the native kernels, in the fast layout: one form for a convolution, one for the gradient by its kernel."""

from __future__ import annotations

import math

from jax import Array, lax
from jax.extend.core import JaxprEqn

from unisono._src.native import convolutions
from unisono._src.native.library import load_kernels
from unisono._src.xla.rewrite.equations import Params
from unisono._src.xla.rewrite.phases import has_phases
from unisono._src.xla.rewrite.pieces import ConvolutionSizes
from unisono._src.xla.rewrite.window import Window, is_larger

LEAST_DEPTH = 16
"""Products for each result from which on the native kernels are faster than XLA's."""

LEAST_GRADIENT_DEPTH = 8
"""The same of a gradient by a kernel, for the convolution whose kernel it is."""


def has_native_kernel(eqn: JaxprEqn, sizes: ConvolutionSizes) -> bool:
    """Return whether a native kernel is there for a convolution, and is faster for it: in bfloat16 and float16 too, computed in float32."""
    params = eqn.params
    depth = math.prod(sizes.results) * sizes.rows if sizes.is_gradient else math.prod(sizes.taps) * sizes.ins
    least = LEAST_GRADIENT_DEPTH if sizes.is_gradient else LEAST_DEPTH
    return (
        sizes.is_one_group
        and len(sizes.taps) <= 2
        and depth >= least
        and is_dense_or_has_phases(params)
        and load_kernels().level is not None
    )


def is_dense_or_has_phases(params: Params) -> bool:
    window = Window.of(params)
    return set(window.spread) == {1} or has_phases(window)


def convolve_natively(x: Array, w: Array, window: Window) -> Array:
    """Return the convolution of arrays in the fast layout, in one or two dimensions of space, as float32."""
    x, w = (array.astype("float32") for array in (x, w))
    if len(window.strides) == 1:
        y = convolve_natively(lax.expand_dims(x, [1]), lax.expand_dims(w, [0]), window.add_first_dimension())
        return lax.squeeze(y, [1])
    results = window.results(x.shape[1:-1], w.shape[:-2])
    before = [low for low, _ in window.padding]
    if not is_larger(w.shape[:-2], results):
        return convolutions.call_convolution(x, w, results, window.strides, before, window.dilation)
    # The gradient by a kernel: w is the gradient by the output, and the features of both are the rows of the batch.
    rows = lax.transpose(x, (3, 1, 2, 0))
    gradient = lax.transpose(w, (2, 0, 1, 3))
    y = convolutions.call_kernel_gradient(rows, gradient, results, window.dilation, before, window.strides)
    return lax.transpose(y, (2, 0, 1, 3))
