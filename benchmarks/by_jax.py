"""The limit: a step of each model written by hand in JAX, without a framework, as one jitted function over donated buffers.

python by_jax.py WORKLOAD SETTINGS-AS-JSON

With {"form": {"rewritten": true}} the engine's rewrites are applied to it as well, and it is compiled with the engine's options.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from applications_by_jax import mobilenet, resnet
from jax import lax
from layers_by_jax import Model, Parameters, apply_dense, batch_norm, convolution, dense, glorot, keys, max_pool, normalized
from timing import report
from workloads import BLOCKS, CLASSES, HEADS, TOKENS, VOCABULARY, WIDTH, WORKLOADS


def mnist(*features: int) -> Model:
    key, channels, side = keys(), 1, 28
    parameters: Parameters = {"convolutions": []}
    for count in features:
        parameters["convolutions"].append({"kernel": glorot(key(), 3, 3, channels, count), "bias": jnp.zeros(count)})
        channels, side = count, (side - 2) // 2
    parameters |= {"hidden": dense(key, channels * side * side, 64), "top": dense(key, 64, CLASSES)}

    def logits(of: Parameters, other: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        for one in of["convolutions"]:
            x = max_pool(jax.nn.relu(convolution(one, x, "VALID")))
        hidden = jax.nn.relu(apply_dense(of["hidden"], x.reshape(x.shape[0], -1)))
        return apply_dense(of["top"], hidden), other

    return parameters, (), logits


def cifar() -> Model:
    key, channels = keys(), 3
    layers, moving = [], []
    for features in (64, 128, 256):
        for _ in range(3):
            kernel = {"kernel": glorot(key(), 3, 3, channels, features), "bias": jnp.zeros(features)}
            layers.append(kernel | {"gamma": jnp.ones(features), "beta": jnp.zeros(features)})
            moving.append({"mean": jnp.zeros(features), "variance": jnp.ones(features)})
            channels = features
    parameters = {"layers": layers, "top": dense(key, 256, CLASSES)}

    def logits(of: Parameters, other: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        after = []
        for number, (layer, state) in enumerate(zip(of["layers"], other, strict=True)):
            x, state = batch_norm(layer, convolution(layer, x, "SAME"), state)
            x = jax.nn.relu(x)
            after.append(state)
            if number in (2, 5):
                rows, height, width, features = x.shape
                x = x.reshape(rows, height // 2, 2, width // 2, 2, features).mean((2, 4))
        return apply_dense(of["top"], x.mean((1, 2))), after

    return parameters, moving, logits


def mlp() -> Model:
    key = keys()

    def logits(of: Parameters, other: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        hidden = jax.nn.sigmoid(apply_dense(of["hidden"], x.reshape(x.shape[0], -1)))
        return apply_dense(of["top"], hidden), other

    return {"hidden": dense(key, 784, 128), "top": dense(key, 128, CLASSES)}, (), logits


def transformer() -> Model:
    key = keys()
    norm = lambda: {"gamma": jnp.ones(WIDTH), "beta": jnp.zeros(WIDTH)}  # noqa: E731
    blocks = [
        {
            "queries": dense(key, WIDTH, 3 * WIDTH),
            "out": dense(key, WIDTH, WIDTH),
            "wide": dense(key, WIDTH, 4 * WIDTH),
            "narrow": dense(key, 4 * WIDTH, WIDTH),
            "first": norm(),
            "second": norm(),
        }
        for _ in range(BLOCKS)
    ]
    embedded = {
        name: jax.random.uniform(key(), (n, WIDTH), minval=-0.05, maxval=0.05)
        for name, n in (("words", VOCABULARY), ("places", TOKENS))
    }
    parameters = embedded | {"blocks": blocks, "top": dense(key, WIDTH, CLASSES)}

    def logits(of: Parameters, other: Any, words: jax.Array) -> tuple[jax.Array, Any]:
        is_word, rows = words != 0, words.shape[0]
        x = of["words"][words] + of["places"]
        for block in of["blocks"]:
            q, k, v = jnp.moveaxis(apply_dense(block["queries"], x).reshape(rows, TOKENS, 3, HEADS, -1), 2, 0)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
            weights = jax.nn.softmax(jnp.where(is_word[:, None, None], scores, -1e9))
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, TOKENS, WIDTH)
            x = normalized(block["first"], x + apply_dense(block["out"], mixed))
            wide = jax.nn.relu(apply_dense(block["wide"], x))
            x = normalized(block["second"], x + apply_dense(block["narrow"], wide))
        weight = is_word[..., None].astype(x.dtype)
        return apply_dense(of["top"], (x * weight).sum(1) / weight.sum(1)), other

    return parameters, (), logits


def lstm() -> Model:
    key, width = keys(), 128
    parameters = {
        "inputs": dense(key, 64, 4 * width),
        "kernel": glorot(key(), width, 4 * width),
        "top": dense(key, width, CLASSES),
    }

    def logits(of: Parameters, other: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        given = jnp.moveaxis(apply_dense(of["inputs"], x), 1, 0)

        def step(carry: tuple[jax.Array, jax.Array], now: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            hidden, cell = carry
            i, f, g, o = jnp.split(now + hidden @ of["kernel"], 4, axis=-1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(cell), cell), None

        zeros = jnp.zeros((x.shape[0], width))
        (hidden, _), _ = lax.scan(step, (zeros, zeros), given)
        return apply_dense(of["top"], hidden), other

    return parameters, (), logits


def gru() -> Model:
    key, width = keys(), 128
    parameters = {
        "words": jax.random.uniform(key(), (VOCABULARY, 64), minval=-0.05, maxval=0.05),
        "inputs": dense(key, 64, 3 * width),
        "hidden": dense(key, width, 3 * width),
        "top": dense(key, width, CLASSES),
    }

    def logits(of: Parameters, other: Any, words: jax.Array) -> tuple[jax.Array, Any]:
        given = jnp.moveaxis(apply_dense(of["inputs"], of["words"][words]), 1, 0)

        def step(hidden: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            place, is_word = now
            z, r, new = jnp.split(place, 3, axis=-1)
            by_z, by_r, by_new = jnp.split(apply_dense(of["hidden"], hidden), 3, axis=-1)
            z, r = jax.nn.sigmoid(z + by_z), jax.nn.sigmoid(r + by_r)
            after = z * hidden + (1 - z) * jnp.tanh(new + r * by_new)
            return jnp.where(is_word[:, None], after, hidden), None

        hidden, _ = lax.scan(step, jnp.zeros((words.shape[0], width)), (given, jnp.moveaxis(words != 0, 1, 0)))
        return apply_dense(of["top"], hidden), other

    return parameters, (), logits


def sgd(rate: float, state: Any, gradients: Any, parameters: Any) -> tuple[Any, Any]:
    momenta = jax.tree.map(lambda m, g: 0.9 * m - rate * g, state, gradients)
    return momenta, jax.tree.map(jnp.add, parameters, momenta)


def adam(rate: float, state: Any, gradients: Any, parameters: Any) -> tuple[Any, Any]:
    count, first, second = state
    count = count + 1
    first = jax.tree.map(lambda m, g: m + (g - m) * 0.1, first, gradients)
    second = jax.tree.map(lambda v, g: v + (g * g - v) * 0.001, second, gradients)
    alpha = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    parameters = jax.tree.map(lambda p, m, v: p - alpha * m / (jnp.sqrt(v) + 1e-7), parameters, first, second)
    return (count, first, second), parameters


MADE: dict[str, tuple[Callable[[], Model], Any]] = {
    "W1 MNIST, two convolutions": (lambda: mnist(32, 64), functools.partial(adam, 1e-3)),
    "W1 MNIST, one convolution": (lambda: mnist(32), functools.partial(adam, 1e-3)),
    "W2 CIFAR": (cifar, functools.partial(sgd, 0.1)),
    "W3 MLP, batch 32": (mlp, functools.partial(adam, 1e-4)),
    "W3 MLP, batch 6000": (mlp, functools.partial(adam, 1e-4)),
    "W4 transformer": (transformer, functools.partial(adam, 1e-4)),
    "W5 LSTM": (lstm, functools.partial(adam, 1e-3)),
    "W6 ResNet-50": (resnet, functools.partial(sgd, 0.01)),
    "W7 MobileNetV2": (mobilenet, functools.partial(sgd, 0.01)),
    "W8 GRU with masks": (gru, functools.partial(adam, 1e-3)),
}


def training(name: str, at_once: int = 1, is_rewritten: bool = False) -> tuple[Any, Any, Callable[[int], Iterator[Any]]]:
    """(a jitted call over so many batches, the first state, what gives the batches of an epoch)"""
    make, optimize = MADE[name]
    parameters, other, logits_of = make()
    zeros = lambda: jax.tree.map(jnp.zeros_like, parameters)  # noqa: E731
    slots = zeros() if optimize.func is sgd else (jnp.zeros(()), zeros(), zeros())

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        parameters, other, slots, metrics = state
        x, y = batch

        def loss(parameters: Parameters) -> tuple[jax.Array, Any]:
            logits, after = logits_of(parameters, other, x)
            each = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
            return each.mean(), (after, (logits.argmax(-1) == y).sum())

        (value, (after, right)), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        slots, parameters = optimize(slots, gradients, parameters)
        return (parameters, after, slots, (metrics[0] + value, metrics[1] + right)), None

    def steps(state: Any, batches: Any) -> Any:
        if at_once == 1:
            return step(state, jax.tree.map(lambda of: of[0], batches))[0]
        return lax.scan(step, state, batches)[0]

    options = None
    if is_rewritten:
        from unisono._src.xla.determinism import get_compiler_options
        from unisono._src.xla.rewrite import rewrite_function

        steps = rewrite_function(steps, jax.default_backend())
        options = get_compiler_options(jax.default_backend())
    call = jax.jit(steps, donate_argnums=0, compiler_options=options)
    workload = WORKLOADS[name]
    x, y = workload.data()

    def batches(epoch: int) -> Iterator[Any]:
        order = np.random.default_rng(epoch).permutation(len(x))
        for first in range(0, len(x), workload.batch * at_once):
            mine = order[first : first + workload.batch * at_once].reshape(-1, workload.batch)
            yield x[mine], y[mine]

    return call, (parameters, other, slots, (jnp.zeros(()), jnp.zeros((), "int32"))), batches


def main() -> None:
    name, form = sys.argv[1], json.loads(sys.argv[2]).get("form", {})
    at_once = form.get("steps_per_call", 1)
    if WORKLOADS[name].steps % at_once:
        sys.exit(f"{at_once} steps a call do not divide an epoch of {WORKLOADS[name].steps}")
    call, state, batches = training(name, at_once, form.get("rewritten", False))

    def epoch(number: int) -> None:
        nonlocal state
        for given in batches(number):
            state = call(state, given)
        jax.block_until_ready(state)

    report(WORKLOADS[name], epoch)


if __name__ == "__main__":
    main()
