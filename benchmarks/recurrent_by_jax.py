"""Two recurrent nets, written by hand in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from layers_by_jax import Model, Parameters, apply_dense, dense, glorot, keys
from workloads import CLASSES, VOCABULARY


def lstm() -> Model:
    key = keys()
    width = 128
    parameters = {
        "inputs": dense(key, 64, 4 * width),
        "kernel": glorot(key(), width, 4 * width),
        "top": dense(key, width, CLASSES),
    }

    def logits(weights: Parameters, other: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        given = jnp.moveaxis(apply_dense(weights["inputs"], x), 1, 0)

        def step(carry: tuple[jax.Array, jax.Array], now: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            hidden, cell = carry
            i, f, g, o = jnp.split(now + hidden @ weights["kernel"], 4, axis=-1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(cell), cell), None

        zeros = jnp.zeros((x.shape[0], width))
        (hidden, _), _ = lax.scan(step, (zeros, zeros), given)
        return apply_dense(weights["top"], hidden), other

    return parameters, (), logits


def gru() -> Model:
    key = keys()
    width = 128
    parameters = {
        "words": jax.random.uniform(key(), (VOCABULARY, 64), minval=-0.05, maxval=0.05),
        "inputs": dense(key, 64, 3 * width),
        "hidden": dense(key, width, 3 * width),
        "top": dense(key, width, CLASSES),
    }

    def logits(weights: Parameters, other: Any, words: jax.Array) -> tuple[jax.Array, Any]:
        given = jnp.moveaxis(apply_dense(weights["inputs"], weights["words"][words]), 1, 0)

        def step(hidden: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            place, is_word = now
            z, r, new = jnp.split(place, 3, axis=-1)
            by_z, by_r, by_new = jnp.split(apply_dense(weights["hidden"], hidden), 3, axis=-1)
            z = jax.nn.sigmoid(z + by_z)
            r = jax.nn.sigmoid(r + by_r)
            after = z * hidden + (1 - z) * jnp.tanh(new + r * by_new)
            return jnp.where(is_word[:, None], after, hidden), None

        hidden, _ = lax.scan(step, jnp.zeros((words.shape[0], width)), (given, jnp.moveaxis(words != 0, 1, 0)))
        return apply_dense(weights["top"], hidden), other

    return parameters, (), logits
