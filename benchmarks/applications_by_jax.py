"""Two nets of `keras.applications`, written by hand in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from layers_by_jax import Model, Parameters, apply_dense, batch_norm, convolution, dense, glorot, keys
from workloads import CLASSES, MOBILENET, RESNET


class Stack:
    """Convolutions that are normalized: their parameters and moving statistics, in the order in which the net has them."""

    def __init__(self, epsilon: float, momentum: float, has_bias: bool) -> None:
        self.epsilon = epsilon
        self.momentum = momentum
        self.has_bias = has_bias
        self.key = keys()
        self.parameters: list[Parameters] = []
        self.moving: list[Parameters] = []

    def add(self, taps: int, channels: int, features: int) -> None:
        """Add the parameters of one convolution. For a depthwise one, `channels` is 1."""
        bias = {"bias": jnp.zeros(features)} if self.has_bias else {}
        scales = {"gamma": jnp.ones(features), "beta": jnp.zeros(features)}
        self.parameters.append({"kernel": glorot(self.key(), taps, taps, channels, features)} | bias | scales)
        self.moving.append({"mean": jnp.zeros(features), "variance": jnp.ones(features)})

    def apply(self, parameters: list[Parameters], moving: list[Parameters]) -> tuple[Callable[..., jax.Array], list[Parameters]]:
        """Return a function that applies the next convolution, and the list to which it adds its statistics."""
        left = iter(zip(parameters, moving, strict=True))
        moved = []

        def convolved(x: jax.Array, stride: int = 1, groups: int = 1, padding: Any = "SAME") -> jax.Array:
            weights, state = next(left)
            x, state = batch_norm(weights, convolution(weights, x, padding, stride, groups), state, self.epsilon, self.momentum)
            moved.append(state)
            return x

        return convolved, moved


def resnet() -> Model:
    """A block strides in its first convolution, and convolutions have biases."""
    stack = Stack(1.001e-5, 0.99, has_bias=True)
    stack.add(7, 3, 64)
    channels = 64
    for features, blocks, _ in RESNET:
        for block in range(blocks):
            if not block:
                stack.add(1, channels, 4 * features)
            stack.add(1, channels, features)
            stack.add(3, features, features)
            stack.add(1, features, 4 * features)
            channels = 4 * features

    def logits(weights: Parameters, other: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        convolved, moved = stack.apply(weights["convolutions"], other)
        x = jax.nn.relu(convolved(x, 2, padding=((3, 3), (3, 3))))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
        for _, blocks, first_stride in RESNET:
            for block in range(blocks):
                stride = 1 if block else first_stride
                shortcut = x if block else convolved(x, stride)
                x = jax.nn.relu(convolved(x, stride))
                x = jax.nn.relu(convolved(x))
                x = jax.nn.relu(shortcut + convolved(x))
        return apply_dense(weights["top"], x.mean((1, 2))), moved

    return {"convolutions": stack.parameters, "top": dense(stack.key, channels, CLASSES)}, stack.moving, logits


def mobilenet() -> Model:
    stack = Stack(1e-3, 0.999, has_bias=False)
    stack.add(3, 3, 32)
    channels = 32
    for expansion, features, blocks, _ in MOBILENET:
        for _ in range(blocks):
            wide = expansion * channels
            if expansion > 1:
                stack.add(1, channels, wide)
            stack.add(3, 1, wide)
            stack.add(1, wide, features)
            channels = features
    stack.add(1, channels, 1280)

    def logits(weights: Parameters, other: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        convolved, moved = stack.apply(weights["convolutions"], other)
        x = jax.nn.relu6(convolved(x, 2))
        for expansion, _, blocks, first_stride in MOBILENET:
            for block in range(blocks):
                before = x
                x = jax.nn.relu6(convolved(x)) if expansion > 1 else x
                x = jax.nn.relu6(convolved(x, 1 if block else first_stride, groups=x.shape[-1]))
                x = convolved(x) + before if block else convolved(x)
        x = jax.nn.relu6(convolved(x))
        return apply_dense(weights["top"], x.mean((1, 2))), moved

    return {"convolutions": stack.parameters, "top": dense(stack.key, 1280, CLASSES)}, stack.moving, logits
