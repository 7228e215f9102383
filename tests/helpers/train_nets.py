"""A process of its own: trains small random nets on one placement and prints their fingerprints, as JSON.

python train_nets.py '{"devices": 3, "first": 0, "count": 5}': JAX has so many devices, and four replicas run on four of them at most. Net 0
is always the same plain one, the others are drawn by their numbers, which "numbers" lists one by one. With "operations", the words of
digest_operations.py, there are the digests of those as well, and with "seven" a net that sums over one axis of seven.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax

import unisono as un

REPLICAS = 4
spec = json.loads(sys.argv[1])
jax.config.update("jax_num_cpu_devices", spec["devices"])
strategy = un.MirroredStrategy(devices=min(spec["devices"], REPLICAS), replicas=REPLICAS)  # before anything starts JAX

import keras
import numpy as np
from keras import layers, ops

ROWS, BATCH, CLASSES = 60, 32, 10


def plain() -> tuple[tuple[int, ...], list[Any]]:
    """A strided convolution with a bias, its mean over space, a dense layer."""
    return (32, 32, 3), [layers.Conv2D(8, 3, strides=2, padding="same"), layers.GlobalAveragePooling2D()]


def drawn(number: int) -> tuple[tuple[int, ...], list[Any]]:
    """(the shape of a row, layers)"""
    random = np.random.default_rng(number)
    pick = lambda *values: values[random.integers(len(values))]
    size = lambda least, most: int(np.exp(random.uniform(np.log(least), np.log(most + 1))))
    activation = lambda: pick(None, "relu", "gelu", "tanh", "softmax")
    kind = pick("images", "images", "series", "rows")
    if kind == "rows":
        stack: list[Any] = []
        for _ in range(size(1, 4)):
            stack.append(layers.Dense(size(1, 300), activation()))
            stack += pick([], [layers.BatchNormalization()], [layers.LayerNormalization()], [layers.Dropout(0.2)])
        return (size(1, 800),), stack
    if kind == "series":
        stack = []
        for _ in range(size(1, 3)):
            stack += pick(
                [layers.Conv1D(size(1, 40), pick(1, 3, 5), strides=pick(1, 2), padding="same", activation=activation())],
                [layers.LSTM(size(2, 40), return_sequences=True)],
                [layers.GRU(size(2, 40), return_sequences=True)],
                [layers.Dense(size(2, 100), activation()), layers.LayerNormalization()],
            )
        return (size(4, 60), size(1, 40)), [
            *stack,
            pick(layers.GlobalAveragePooling1D, layers.GlobalMaxPooling1D, layers.Flatten)(),
        ]
    stack = []
    for _ in range(size(1, 3)):
        kernel, stride, padding = pick(1, 2, 3, 3, 5, 7), pick(1, 1, 2), "same"
        stack += pick(
            [
                layers.Conv2D(
                    size(1, 40), kernel, strides=stride, padding=padding, use_bias=pick(True, False), activation=activation()
                )
            ],
            [layers.Conv2D(size(1, 40), kernel, dilation_rate=2, padding=padding)],
            [layers.SeparableConv2D(size(1, 40), kernel, strides=stride, padding=padding)],
            [layers.DepthwiseConv2D(kernel, strides=stride, padding=padding)],
            [layers.Conv2DTranspose(size(1, 24), kernel, strides=stride, padding=padding)],
        )
        stack += pick([], [layers.BatchNormalization()], [layers.GroupNormalization(1)], [layers.Dropout(0.2)])
        stack += pick([], [layers.MaxPooling2D(2, padding="same")], [layers.AveragePooling2D(3, 2, padding="same")])
    side = size(6, 40)
    return (side, side, pick(1, 3, size(1, 24))), [*stack, pick(layers.GlobalAveragePooling2D, layers.Flatten)()]


class Weighted(layers.Layer):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(1, 1, 2, 2, 8, 1, 8), initializer="ones")

    def call(self, x: Any) -> Any:
        return ops.sum(x * self.scale, axis=3)


def seven() -> tuple[tuple[int, ...], list[Any]]:
    """Ends the process with a fault of memory where YNNPACK has the sum."""
    return (1, 2, 2, 8, 8, 8), [Weighted(), layers.Flatten()]


def fingerprint(number: int, make: Callable[[], tuple[tuple[int, ...], list[Any]]]) -> str:
    keras.utils.set_random_seed(number)
    random = np.random.default_rng(number)
    with strategy.scope():
        shape, stack = make()
        model = keras.Sequential([layers.Input(shape), *stack, layers.Dense(CLASSES)])
    model.compile("adam" if number % 2 else "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = random.standard_normal((ROWS, *shape), "float32"), random.integers(0, CLASSES, ROWS)
    history = model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0).history
    return un.fingerprint(model, np.array(history["loss"]), model.predict(x, batch_size=BATCH, verbose=0))


if __name__ == "__main__":
    numbers = spec.get("numbers") or range(spec.get("first", 0), spec.get("first", 0) + spec["count"])
    found = {str(number): fingerprint(number, functools.partial(drawn, number) if number else plain) for number in numbers}
    if spec.get("seven"):
        found["seven"] = fingerprint(7, seven)
    if "operations" in spec:
        import digest_operations

        found |= digest_operations.digests_of(*spec["operations"])
    print(json.dumps(found))
