"""Calls of the kernels that sum over the rows of an array, for each column, in traced programs, with their gradients.

Rows are all dimensions but the last one, which has the columns.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def measure_columns(x: Array) -> tuple[Array, Array, Array]:
    """Return the means of the columns, the variances, and what the means are too small by."""
    moments = jax.ffi.ffi_call("unisono_measure_columns", jax.ShapeDtypeStruct((3, x.shape[-1]), jnp.float32))(x)
    return moments[0], moments[1], moments[2]


def add_up_columns(values: Array, x: Array) -> tuple[Array, Array]:
    """Return the sums of the columns of an array, and of its products with another array."""
    sums = jax.ffi.ffi_call("unisono_sum_columns", jax.ShapeDtypeStruct((2, x.shape[-1]), jnp.float32))(values, x)
    return sums[0], sums[1]


def add_up_gated_columns(
    values: Array, x: Array, scale: Array, offset: Array, low: float, high: float | None
) -> tuple[Array, Array]:
    """Return the same of the values where `x * scale + offset` is above `low` and, if there is a `high`, below it."""
    call = jax.ffi.ffi_call("unisono_sum_gated_columns", jax.ShapeDtypeStruct((2, x.shape[-1]), jnp.float32))
    bounds = {"low": np.float32(low), "high": np.float32(np.nan if high is None else high)}
    sums = call(values, x, scale, offset, **bounds)
    return sums[0], sums[1]


def count_summed(x: Array) -> int:
    """Return how many elements a column has."""
    return x.size // x.shape[-1]


@jax.custom_vjp
def find_means(x: Array) -> Array:
    """Return the means of the columns."""
    return measure_columns(x)[0]


def find_means_forward(x: Array) -> tuple[Array, Array]:
    return find_means(x), x


def find_means_backward(x: Array, by_means: Array) -> tuple[Array]:
    return (jnp.broadcast_to(by_means / count_summed(x), x.shape),)


find_means.defvjp(find_means_forward, find_means_backward)


@jax.custom_vjp
def find_variances(x: Array) -> Array:
    """Return the variances of the columns."""
    return measure_columns(x)[1]


def find_variances_forward(x: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    means, variances, rests = measure_columns(x)
    return variances, (x, means, rests)


def find_variances_backward(residuals: tuple[Array, Array, Array], by_variances: Array) -> tuple[Array]:
    """Return the gradient by the array. The means, which depend on it as well, add nothing: differences from them add up to zero.

    So they do in float32 with the rest of the means alone.
    """
    x, means, rests = residuals
    return (((x - means) - rests) * (by_variances * (2 / count_summed(x))),)


find_variances.defvjp(find_variances_forward, find_variances_backward)


@jax.custom_vjp
def scale_columns(x: Array, scale: Array, offset: Array) -> Array:
    """Return `x * scale + offset`, where both have a number for each column."""
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
    """Return `x * scale + offset`, but at least `low`, and at most `high`, if there is one.

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
    """Return the gradients. Which elements lie between the bounds is computed again, from what is read anyway."""
    x, scale, offset = residuals
    by_offset, by_scale = add_up_gated_columns(by_result, x, scale, offset, low, high)
    y = x * scale + offset
    is_open = y > low if high is None else (y > low) & (y < high)
    return jnp.where(is_open, by_result, 0) * scale, by_scale, by_offset


scale_and_clip_columns.defvjp(scale_and_clip_columns_forward, scale_and_clip_columns_backward)
