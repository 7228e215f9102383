"""Layers written by hand in JAX: their parameters, and what they compute.

What the engine rewrites is written by hand here: a pool that does not overlap is a maximum over a reshaped array, whose gradient goes to
the first largest value; batch statistics are taken in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Parameters = dict[str, Any]


def glorot(key: jax.Array, *shape: int) -> jax.Array:
    fan = int(np.prod(shape[:-2])) * (shape[-2] + shape[-1])
    return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0) * (6 / fan) ** 0.5


def keys() -> Callable[[], jax.Array]:
    state = [jax.random.key(0)]

    def one() -> jax.Array:
        state[0], key = jax.random.split(state[0])
        return key

    return one


def dense(key: Callable[[], jax.Array], inputs: int, outputs: int) -> Parameters:
    return {"kernel": glorot(key(), inputs, outputs), "bias": jnp.zeros(outputs)}


def apply_dense(weights: Parameters, x: jax.Array) -> jax.Array:
    return x @ weights["kernel"] + weights["bias"]


def convolution(weights: Parameters, x: jax.Array, padding: Any, stride: int = 1, groups: int = 1) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(
        x, weights["kernel"], (stride, stride), padding, dimension_numbers=layout, feature_group_count=groups
    )
    return y + weights["bias"] if "bias" in weights else y


@jax.custom_vjp
def max_pool(x: jax.Array) -> jax.Array:
    return windows(x).max(-2)


def windows(x: jax.Array) -> jax.Array:
    """(rows, height / 2, width / 2, the four of a window, channels)"""
    rows, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    x = x.reshape(rows, height // 2, 2, width // 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(rows, height // 2, width // 2, 4, channels)


def pool_forward(x: jax.Array) -> tuple[jax.Array, Any]:
    return max_pool(x), x


def pool_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    inside = windows(x)
    first = jax.nn.one_hot(inside.argmax(-2), 4, axis=-2, dtype=x.dtype)
    rows, height, width, channels = x.shape
    spread = (first * gradient[..., None, :]).reshape(rows, height // 2, width // 2, 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
    spread = spread.reshape(rows, height // 2 * 2, width // 2 * 2, channels)
    return (jnp.pad(spread, ((0, 0), (0, height % 2), (0, width % 2), (0, 0))),)


max_pool.defvjp(pool_forward, pool_backward)


def batch_norm(
    weights: Parameters, x: jax.Array, moving: Parameters, epsilon: float = 1e-3, momentum: float = 0.99
) -> tuple[jax.Array, Parameters]:
    mean = x.mean((0, 1, 2))
    variance = (x * x).mean((0, 1, 2)) - mean * mean
    moved = jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, moving, {"mean": mean, "variance": variance})
    scale = weights["gamma"] * lax.rsqrt(variance + epsilon)
    return x * scale + (weights["beta"] - mean * scale), moved


def normalized(weights: Parameters, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-3) * weights["gamma"] + weights["beta"]


Model = tuple[Parameters, Any, Callable[[Parameters, Any, jax.Array], tuple[jax.Array, Any]]]
"""(parameters, other state, what gives the logits and the next other state)"""
