"""Calls of the kernels for convolutions, in traced programs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import Array

from unisono._src.typing import Keywords, Shape

Pair = Sequence[int]
"""One number for each of the two spatial dimensions."""


def call_convolution(
    x: Array, w: Array, results: Shape, strides: Pair, padding: Pair, dilation: Pair, is_reversed: bool = False
) -> Array:
    """Convolve x (rows, y, x, features) with w (y, x, in, out). A reversed w is (y, x, out, in), with the last tap first.

    `results` is the size of the output in space. `padding` is what lies before the input; what is missing after it is filled too.
    """
    shape = (x.shape[0], *results, w.shape[2 if is_reversed else 3])
    return jax.ffi.ffi_call("unisono_convolve", jax.ShapeDtypeStruct(shape, x.dtype))(
        x, w, **pack_numbers(strides=strides, padding=padding, dilation=dilation), is_reversed=is_reversed
    )


def call_convolution_with_bias(
    x: Array, w: Array, bias: Array, results: Shape, strides: Pair, padding: Pair, dilation: Pair, is_rectified: bool
) -> Array:
    """Convolve, add a bias for each feature, and apply ReLU if `is_rectified`."""
    call = jax.ffi.ffi_call("unisono_convolve_with_bias", jax.ShapeDtypeStruct((x.shape[0], *results, w.shape[3]), x.dtype))
    return call(x, w, bias, **pack_numbers(strides=strides, padding=padding, dilation=dilation), is_rectified=is_rectified)


def call_kernel_gradient(x: Array, gradient: Array, taps: Shape, strides: Pair, padding: Pair, dilation: Pair) -> Array:
    """Compute the gradient of `call_convolution` by w. `gradient` is that by its output, `taps` the spatial size of w."""
    shape = (*taps, x.shape[3], gradient.shape[3])
    call = jax.ffi.ffi_call("unisono_convolution_kernel_gradient", jax.ShapeDtypeStruct(shape, x.dtype))
    return call(x, gradient, **pack_numbers(strides=strides, padding=padding, dilation=dilation))


def call_depthwise(x: Array, w: Array, results: Shape, strides: Pair, padding: Pair, dilation: Pair, spread: Pair) -> Array:
    """Convolve each feature of x with its own kernel. The layouts are x (rows, y, x, features) and w (y, x, features).

    `results` is the size of the output in space. `padding` is what lies before the input; what is missing after it is filled too.
    Elements of the input lie `spread` apart, with zeros between them.
    """
    shape = (x.shape[0], *results, x.shape[3])
    call = jax.ffi.ffi_call("unisono_convolve_depthwise", jax.ShapeDtypeStruct(shape, x.dtype))
    return call(x, w, **pack_numbers(strides=strides, padding=padding, dilation=dilation, spread=spread))


def call_depthwise_kernel_gradient(x: Array, gradient: Array, taps: Shape, strides: Pair, padding: Pair, dilation: Pair) -> Array:
    """Compute the gradient of `call_depthwise` by w. `gradient` is that by its output, `taps` the spatial size of w."""
    shape = (*taps, x.shape[3])
    call = jax.ffi.ffi_call("unisono_depthwise_kernel_gradient", jax.ShapeDtypeStruct(shape, x.dtype))
    return call(x, gradient, **pack_numbers(strides=strides, padding=padding, dilation=dilation, spread=(1, 1)))


def pack_numbers(**pairs: Pair) -> Keywords:
    """Pack pairs of numbers as attributes of a call."""
    return {name: np.array(pair, np.int64) for name, pair in pairs.items()}
