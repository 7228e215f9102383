"""Calls of the kernels for matmuls, convolutions and layer normalization, in traced programs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from unisono._src.typing import Keywords, Shape


def call_transposed_product(lefts: Sequence[Array], right: Array, with_sums: bool = False) -> Array:
    """Multiply transposed matrices by `right`, and stack the results.

    `with_sums` adds the sum of the rows of `right` as a last row.

    All matrices have the same number of rows.
    """
    rows = sum(left.shape[1] for left in lefts) + with_sums
    call = jax.ffi.ffi_call("unisono_multiply_transposed", jax.ShapeDtypeStruct((rows, right.shape[1]), right.dtype))
    return call(right, *lefts, with_sums=with_sums)


def call_product(left: Array, right: Array, is_transposed: bool = False) -> Array:
    """Multiply `left` by `right`, or by transposed `right`."""
    shape = (left.shape[0], right.shape[0 if is_transposed else 1])
    return jax.ffi.ffi_call("unisono_multiply", jax.ShapeDtypeStruct(shape, left.dtype))(left, right, is_transposed=is_transposed)


def call_product_with_bias(left: Array, right: Array, bias: Array, is_rectified: bool) -> Array:
    """Multiply, add a bias for each column, and apply ReLU if `is_rectified`."""
    call = jax.ffi.ffi_call("unisono_multiply_with_bias", jax.ShapeDtypeStruct((left.shape[0], right.shape[1]), left.dtype))
    return call(left, right, bias, is_rectified=is_rectified)


def call_gated_product(left: Array, right: Array, gate: Array, is_transposed: bool = False) -> Array:
    """Multiply, and set to zero where `gate` is not positive. `gate` has the result's shape."""
    call = jax.ffi.ffi_call("unisono_multiply_gated", jax.ShapeDtypeStruct(gate.shape, left.dtype))
    return call(left, right, gate, is_transposed=is_transposed)


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


def normalize_rows(x: Array, scale: Array, offset: Array, epsilon: float) -> Array:
    """Normalize along the last axis, then multiply by `scale` and add `offset`. Both are vectors."""
    return cast(Array, compute_rows(epsilon, x, scale, offset))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def compute_rows(epsilon: float, x: Array, scale: Array, offset: Array) -> Array:
    return call_normalization(epsilon, x, scale, offset)[0]


def call_normalization(epsilon: float, x: Array, scale: Array, offset: Array) -> Sequence[Array]:
    """Compute the normalized rows, and two numbers a row for the gradient."""
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct((x.size // x.shape[-1], 2), jnp.float32)]
    return jax.ffi.ffi_call("unisono_normalize_rows", results)(x, scale, offset, epsilon=np.float32(epsilon))


def normalize_forward(epsilon: float, x: Array, scale: Array, offset: Array) -> tuple[Array, tuple[Array, ...]]:
    y, numbers = call_normalization(epsilon, x, scale, offset)
    return y, (x, scale, numbers)


def normalize_backward(_: float, residuals: tuple[Array, ...], by_y: Array) -> tuple[Array, ...]:
    """Compute the gradients by the rows, the scale and the offset."""
    x, scale, numbers = residuals
    results = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (x, scale, scale)]
    return tuple(jax.ffi.ffi_call("unisono_normalize_rows_gradient", results)(x, scale, numbers, by_y))


compute_rows.defvjp(normalize_forward, normalize_backward)
