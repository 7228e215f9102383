"""Calls of the kernels for layer normalization, in traced programs. They have gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


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
