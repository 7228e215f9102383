"""Calls of the kernels for depthwise convolutions, in traced programs."""

from __future__ import annotations

import jax
from jax import Array

from unisono._src.native.convolutions import Pair, pack_numbers
from unisono._src.typing import Shape


def call_depthwise(x: Array, w: Array, results: Shape, strides: Pair, padding: Pair, dilation: Pair, spread: Pair) -> Array:
    """Return the convolution of each feature of x (rows, y, x, features) with its own kernel, from w (y, x, features).

    `results` is the size of the output in space. `padding` is what lies before the input; what is missing after it is filled too.
    Elements of the input lie `spread` apart, with zeros between them.
    """
    shape = (x.shape[0], *results, x.shape[3])
    call = jax.ffi.ffi_call("unisono_convolve_depthwise", jax.ShapeDtypeStruct(shape, x.dtype))
    return call(x, w, **pack_numbers(strides=strides, padding=padding, dilation=dilation, spread=spread))


def call_depthwise_kernel_gradient(x: Array, gradient: Array, taps: Shape, strides: Pair, padding: Pair, dilation: Pair) -> Array:
    """Return the gradient of `call_depthwise` by w, whose size in space is `taps`, from the gradient by its output."""
    shape = (*taps, x.shape[3])
    call = jax.ffi.ffi_call("unisono_depthwise_kernel_gradient", jax.ShapeDtypeStruct(shape, x.dtype))
    return call(x, gradient, **pack_numbers(strides=strides, padding=padding, dilation=dilation, spread=(1, 1)))
