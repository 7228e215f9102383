"""Convolutions by the native kernels, and both gradients.

A gradient by the input is a convolution with the kernel of the forward pass, whose taps are reversed and whose features change
places. The native kernels read that kernel as it is: XLA takes longer to reverse a large kernel than the convolution takes.
"""

from __future__ import annotations

import functools
import math

from jax import Array, lax
from jax.extend.core import JaxprEqn

from unisono._src.kernels.convolution.kernel import Convolve, convolve_with_features_last
from unisono._src.kernels.convolution.pieces import ConvolutionSizes
from unisono._src.kernels.convolution.window import Window, convolve_in_phases, has_phases
from unisono._src.kernels.native import convolutions
from unisono._src.kernels.native.library import load_kernels
from unisono._src.programs.equations import Params, Producers, Replacement
from unisono._src.programs.operands import Atom, get_dtype

LEAST_DEPTH = 16
"""The fewest multiplications for each result for which the native kernels are faster than XLA's."""

LEAST_GRADIENT_DEPTH = 8
"""The same for a gradient by a kernel. It counts the multiplications of the forward convolution."""


def has_native_kernel(eqn: JaxprEqn, sizes: ConvolutionSizes) -> bool:
    """Whether a native kernel takes a convolution, and is faster. Bfloat16 and float16 are computed in float32."""
    is_gradient = is_kernel_gradient(eqn.params)
    depth = math.prod(sizes.results) * sizes.rows if is_gradient else math.prod(sizes.taps) * sizes.ins
    least = LEAST_GRADIENT_DEPTH if is_gradient else LEAST_DEPTH
    return (
        sizes.is_one_group
        and len(sizes.taps) <= 2
        and depth >= least
        and is_dense_or_has_phases(eqn.params)
        and load_kernels().level is not None
    )


def is_dense_or_has_phases(params: Params) -> bool:
    window = Window.of(params)
    return set(window.spread) == {1} or has_phases(window)


def is_kernel_gradient(params: Params) -> bool:
    """Whether a convolution is a gradient by a kernel. Its features are then the rows of the batch, and its rows the features."""
    (row, feature, *_), *_ = params["dimension_numbers"]
    return row > feature


def replace_by_native_kernels(eqn: JaxprEqn, made_by: Producers) -> Replacement:
    """Build the convolution by native kernels."""
    x, w = eqn.invars
    params: Params = eqn.params
    convolve: Convolve = convolve_natively
    if is_kernel_gradient(params):
        convolve = sum_kernel_gradient
    elif (kernel := find_reversed_kernel(params, w, made_by)) is not None:
        w = kernel
        convolve = functools.partial(convolve_natively, is_reversed=True)
        params = dict(params, dimension_numbers=swap_kernel_features(params))
    return Replacement(functools.partial(run_natively, convolve, params, get_dtype(eqn.outvars[0])), (x, w))


def find_reversed_kernel(params: Params, w: Atom, made_by: Producers) -> Atom | None:
    """Find the kernel whose spatial reverse is w.

    None unless its features lie in the order in which the native kernels read it.
    """
    eqn = made_by.find(w)
    _, (w_out, w_in, *w_space), _ = params["dimension_numbers"]
    if eqn is None or eqn.primitive.name != "rev" or set(eqn.params["dimensions"]) != set(w_space):
        return None
    return eqn.invars[0] if w_out < w_in else None


def swap_kernel_features(params: Params) -> tuple[tuple[int, ...], ...]:
    """Swap the kernel's two feature dimensions in the dimension numbers."""
    x, (w_out, w_in, *w_space), out = params["dimension_numbers"]
    return x, (w_in, w_out, *w_space), out


def run_natively(convolve: Convolve, params: Params, dtype: str, x: Array, w: Array) -> Array:
    """Convolve in float32, in one or two dimensions of space. `convolve` takes arrays in the fast layout."""
    x, w = (array.astype("float32") for array in (x, w))
    return convolve_with_features_last(functools.partial(add_dimension, convolve), x, w, params).astype(dtype)


def add_dimension(convolve: Convolve, x: Array, w: Array, window: Window) -> Array:
    """Let a function for two dimensions of space take one, too."""
    if len(window.strides) == 2:
        return convolve(x, w, window)
    y = convolve(lax.expand_dims(x, [1]), lax.expand_dims(w, [0]), window.add_first_dimension())
    return lax.squeeze(y, [1])


def convolve_natively(x: Array, w: Array, window: Window, is_reversed: bool = False) -> Array:
    """Convolve in the fast layout. A reversed kernel is (*space, out, in), with the last tap first."""
    if has_phases(window):
        return convolve_in_phases(functools.partial(convolve_natively, is_reversed=is_reversed), x, w, window, is_reversed)
    results = window.results(x.shape[1:-1], w.shape[:-2])
    before = [low for low, _ in window.padding]
    return convolutions.call_convolution(x, w, results, window.strides, before, window.dilation, is_reversed)


def sum_kernel_gradient(x: Array, w: Array, window: Window) -> Array:
    """Compute a gradient by a kernel.

    Here w is the gradient by the output, and the features of x and of w are the rows of the batch.
    """
    if has_phases(window):
        return convolve_in_phases(sum_kernel_gradient, x, w, window)
    results = window.results(x.shape[1:-1], w.shape[:-2])
    before = [low for low, _ in window.padding]
    rows = lax.transpose(x, (3, 1, 2, 0))
    gradient = lax.transpose(w, (2, 0, 1, 3))
    y = convolutions.call_kernel_gradient(rows, gradient, results, window.dilation, before, window.strides)
    return lax.transpose(y, (2, 0, 1, 3))
