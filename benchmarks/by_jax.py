"""The limit: a step of each model written by hand in JAX, without a framework, as one jitted function over donated buffers.

python by_jax.py WORKLOAD SETTINGS-AS-JSON

With {"form": {"rewritten": true}} the engine's rewrites are applied to it as well, and it is compiled with the engine's options. With
{"form": {"devices": N}} each of N devices takes its rows of a batch, by `shard_map`, and adds gradients by collectives; without rewrites.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from layers_by_jax import Model, Parameters, apply_dense, batch_norm, convolution, dense, glorot, keys, max_pool, normalized
from recurrent_by_jax import gru, lstm
from timing import report_epochs
from workloads import BLOCKS, CLASSES, HEADS, MORE, TINY, TOKENS, VOCABULARY, WIDTH, WORKLOADS

AXIS = "devices"


def mnist(*features: int) -> Model:
    key = keys()
    channels = 1
    side = 28
    parameters: Parameters = {"convolutions": []}
    for count in features:
        parameters["convolutions"].append({"kernel": glorot(key(), 3, 3, channels, count), "bias": jnp.zeros(count)})
        channels = count
        side = (side - 2) // 2
    parameters |= {"hidden": dense(key, channels * side * side, 64), "top": dense(key, 64, CLASSES)}

    def logits(weights: Parameters, other: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        for one in weights["convolutions"]:
            x = max_pool(jax.nn.relu(convolution(one, x, "VALID")))
        hidden = jax.nn.relu(apply_dense(weights["hidden"], x.reshape(x.shape[0], -1)))
        return apply_dense(weights["top"], hidden), other

    return parameters, (), logits


def cifar() -> Model:
    key = keys()
    channels = 3
    layers = []
    moving = []
    for features in (64, 128, 256):
        for _ in range(3):
            kernel = {"kernel": glorot(key(), 3, 3, channels, features), "bias": jnp.zeros(features)}
            layers.append(kernel | {"gamma": jnp.ones(features), "beta": jnp.zeros(features)})
            moving.append({"mean": jnp.zeros(features), "variance": jnp.ones(features)})
            channels = features
    parameters = {"layers": layers, "top": dense(key, 256, CLASSES)}

    def logits(weights: Parameters, other: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        after = []
        for number, (layer, state) in enumerate(zip(weights["layers"], other, strict=True)):
            x, state = batch_norm(layer, convolution(layer, x, "SAME"), state)
            x = jax.nn.relu(x)
            after.append(state)
            if number in (2, 5):
                rows, height, width, features = x.shape
                x = x.reshape(rows, height // 2, 2, width // 2, 2, features).mean((2, 4))
        return apply_dense(weights["top"], x.mean((1, 2))), after

    return parameters, moving, logits


def mlp(inputs: int, width: int, activation: Callable[[jax.Array], jax.Array]) -> Model:
    key = keys()

    def logits(weights: Parameters, other: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        hidden = activation(apply_dense(weights["hidden"], x.reshape(x.shape[0], -1)))
        return apply_dense(weights["top"], hidden), other

    return {"hidden": dense(key, inputs, width), "top": dense(key, width, CLASSES)}, (), logits


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

    def logits(weights: Parameters, other: Any, words: jax.Array) -> tuple[jax.Array, Any]:
        is_word = words != 0
        rows = words.shape[0]
        x = weights["words"][words] + weights["places"]
        for block in weights["blocks"]:
            q, k, v = jnp.moveaxis(apply_dense(block["queries"], x).reshape(rows, TOKENS, 3, HEADS, -1), 2, 0)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
            attended = jax.nn.softmax(jnp.where(is_word[:, None, None], scores, -1e9))
            mixed = jnp.einsum("bhqk,bkhd->bqhd", attended, v).reshape(rows, TOKENS, WIDTH)
            x = normalized(block["first"], x + apply_dense(block["out"], mixed))
            wide = jax.nn.relu(apply_dense(block["wide"], x))
            x = normalized(block["second"], x + apply_dense(block["narrow"], wide))
        weight = is_word[..., None].astype(x.dtype)
        return apply_dense(weights["top"], (x * weight).sum(1) / weight.sum(1)), other

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
    "W3 MLP, batch 32": (lambda: mlp(784, 128, jax.nn.sigmoid), functools.partial(adam, 1e-4)),
    "W3 MLP, batch 6000": (lambda: mlp(784, 128, jax.nn.sigmoid), functools.partial(adam, 1e-4)),
    "W4 transformer": (transformer, functools.partial(adam, 1e-4)),
    "W5 LSTM": (lstm, functools.partial(adam, 1e-3)),
    "W6 ResNet-50": (resnet, functools.partial(sgd, 0.01)),
    "W7 MobileNetV2": (mobilenet, functools.partial(sgd, 0.01)),
    "W8 GRU with masks": (gru, functools.partial(adam, 1e-3)),
    TINY: (lambda: mlp(64, 32, jax.nn.relu), functools.partial(adam, 1e-3)),
}


def make_training(
    name: str, at_once: int = 1, is_rewritten: bool = False, devices: int = 1
) -> tuple[Any, Any, Callable[[int], Iterator[Any]]]:
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
        if devices > 1:
            value, after, gradients = lax.pmean((value, after, gradients), AXIS)
            right = lax.psum(right, AXIS)
        slots, parameters = optimize(slots, gradients, parameters)
        return (parameters, after, slots, (metrics[0] + value, metrics[1] + right)), None

    def steps(state: Any, batches: Any) -> Any:
        if at_once == 1:
            return step(state, jax.tree.map(lambda leaf: leaf[0], batches))[0]
        return lax.scan(step, state, batches)[0]

    options = None
    if is_rewritten:
        from unisono._src.engine.xla.determinism import get_compiler_options
        from unisono._src.kernels.rewriting import rewrite_function

        steps = rewrite_function(steps, jax.default_backend())
        options = get_compiler_options(jax.default_backend())
    call = jax.jit(steps, donate_argnums=0, compiler_options=options) if devices == 1 else share_rows(steps, devices)
    workload = (WORKLOADS | MORE)[name]
    x, y = workload.data()

    def batches(epoch: int) -> Iterator[Any]:
        order = np.random.default_rng(epoch).permutation(len(x))
        for first in range(0, len(x), workload.batch * at_once):
            mine = order[first : first + workload.batch * at_once].reshape(-1, workload.batch)
            yield x[mine], y[mine]

    return call, (parameters, other, slots, (jnp.zeros(()), jnp.zeros((), "int32"))), batches


def share_rows(steps: Callable[[Any, Any], Any], devices: int) -> Any:
    """Return a jitted call in which each device takes its rows of the batches; all have the whole state."""
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    specs = PartitionSpec(), PartitionSpec(None, AXIS)
    shared = jax.shard_map(steps, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return jax.jit(shared, donate_argnums=0, in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs))


def main() -> None:
    name = sys.argv[1]
    form = json.loads(sys.argv[2]).get("form", {})
    at_once = form.get("steps_per_call", 1)
    devices = form.get("devices", 1)
    workload = (WORKLOADS | MORE)[name]
    if workload.steps % at_once:
        sys.exit(f"{at_once} steps a call do not divide an epoch of {workload.steps}")
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    call, state, batches = make_training(name, at_once, form.get("rewritten", False), devices)

    def epoch(number: int) -> None:
        nonlocal state
        for given in batches(number):
            state = call(state, given)
        jax.block_until_ready(state)

    report_epochs(workload, epoch)


if __name__ == "__main__":
    main()
