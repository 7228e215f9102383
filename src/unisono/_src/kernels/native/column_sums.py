"""Calls of the kernels that sum the columns of an array.

They are for traced programs, and have gradients. The last dimension holds the columns; all others together are the rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def measure_columns(x: Array) -> tuple[Array, Array, Array]:
    """Measure the columns: means, variances, and the rounding errors of the means. An error is what a mean is too small by."""
    moments = jax.ffi.ffi_call("unisono_measure_columns", jax.ShapeDtypeStruct((3, x.shape[-1]), jnp.float32))(x)
    return moments[0], moments[1], moments[2]


def add_up_columns(values: Array, x: Array) -> tuple[Array, Array]:
    """Sum the columns of `values`, and of `values * x`."""
    sums = jax.ffi.ffi_call("unisono_sum_columns", jax.ShapeDtypeStruct((2, x.shape[-1]), jnp.float32))(values, x)
    return sums[0], sums[1]


def add_up_gated_columns(
    values: Array, x: Array, scale: Array, offset: Array, low: float, high: float | None
) -> tuple[Array, Array]:
    """Sum the same columns, of values within bounds alone.

    They count where `x * scale + offset` is above `low` and, if there is a `high`, below it.
    """
    call = jax.ffi.ffi_call("unisono_sum_gated_columns", jax.ShapeDtypeStruct((2, x.shape[-1]), jnp.float32))
    bounds = {"low": np.float32(low), "high": np.float32(np.nan if high is None else high)}
    sums = call(values, x, scale, offset, **bounds)
    return sums[0], sums[1]


def count_summed(x: Array) -> int:
    """The number of elements in a column."""
    return x.size // x.shape[-1]


@jax.custom_vjp
def find_means(x: Array) -> Array:
    """The means of the columns."""
    return measure_columns(x)[0]


def find_means_forward(x: Array) -> tuple[Array, Array]:
    return find_means(x), x


def find_means_backward(x: Array, by_means: Array) -> tuple[Array]:
    return (jnp.broadcast_to(by_means / count_summed(x), x.shape),)


find_means.defvjp(find_means_forward, find_means_backward)


@jax.custom_vjp
def find_variances(x: Array) -> Array:
    """The variances of the columns."""
    return measure_columns(x)[1]


def find_variances_forward(x: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    means, variances, rests = measure_columns(x)
    return variances, (x, means, rests)


def find_variances_backward(residuals: tuple[Array, Array, Array], by_variances: Array) -> tuple[Array]:
    """Compute the gradient by the array.

    The means depend on the array as well, but add nothing: differences from a mean sum to zero. In float32 they do so only after
    the rounding error of the mean is subtracted too.
    """
    x, means, rests = residuals
    return (((x - means) - rests) * (by_variances * (2 / count_summed(x))),)


find_variances.defvjp(find_variances_forward, find_variances_backward)


@jax.custom_vjp
def scale_columns(x: Array, scale: Array, offset: Array) -> Array:
    """Compute `x * scale + offset`, with two numbers a column."""
    return x * scale + offset


def scale_columns_forward(x: Array, scale: Array, offset: Array) -> tuple[Array, tuple[Array, Array]]:
    return scale_columns(x, scale, offset), (x, scale)


def scale_columns_backward(residuals: tuple[Array, Array], by_result: Array) -> tuple[Array, Array, Array]:
    x, scale = residuals
    by_offset, by_scale = add_up_columns(by_result, x)
    return by_result * scale, by_scale, by_offset


scale_columns.defvjp(scale_columns_forward, scale_columns_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scale_and_clip_columns(low: float, high: float | None, x: Array, scale: Array, offset: Array) -> Array:
    """Compute `x * scale + offset`, clipped to the bounds.

    The gradient is that of `jax.nn.relu` and `jax.nn.relu6`: zero at the bounds.
    """
    return jnp.clip(x * scale + offset, low, high)


def scale_and_clip_columns_forward(
    low: float, high: float | None, x: Array, scale: Array, offset: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return scale_and_clip_columns(low, high, x, scale, offset), (x, scale, offset)


def scale_and_clip_columns_backward(
    low: float, high: float | None, residuals: tuple[Array, Array, Array], by_result: Array
) -> tuple[Array, Array, Array]:
    """Compute the gradients. The mask of the open elements is computed again, from arrays that are read anyway."""
    x, scale, offset = residuals
    by_offset, by_scale = add_up_gated_columns(by_result, x, scale, offset, low, high)
    y = x * scale + offset
    is_open = y > low if high is None else (y > low) & (y < high)
    return jnp.where(is_open, by_result, 0) * scale, by_scale, by_offset


scale_and_clip_columns.defvjp(scale_and_clip_columns_forward, scale_and_clip_columns_backward)
