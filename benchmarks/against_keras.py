"""A step of `fit` under strategies against a step of Keras' own `fit` on JAX, in fresh processes that take turns.

python benchmarks/against_keras.py [ROUNDS] [NET ...]

Prints, for each net, milliseconds a step (the median over rounds, of the median over fits of one process), how many times as
fast as Keras that is, and how many times as long it takes as one big batch. "default", `MirroredStrategy()`, is one big batch on
CPU. "strided" is the CIFAR net with strides in place of pools; "depthwise" and "separable" have such convolutions in place of
all but the first.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from typing import Any

PLACEMENTS = {
    "Keras": None,
    "default": {},
    "R = 2 on 2 devices": {"devices": 2},
    "R = 8 on 1 device": {"devices": 1, "replicas": 8},
    "R = 8 on 2 devices": {"devices": 2, "replicas": 8},
}
STEPS = {"mlp": 1500, "mnist": 60, "cifar": 6, "strided": 6, "depthwise": 6, "separable": 6}
FITS = 5


def net(name: str, keras: Any) -> tuple[Any, tuple[int, ...], int, Any]:
    """(model, shape of a row, batch size, optimizer)"""
    layers = keras.layers
    if name == "mlp":
        flat = [layers.Flatten(), layers.Dense(128, "sigmoid"), layers.Dense(10, "softmax")]
        return keras.Sequential([layers.Input((28, 28)), *flat]), (28, 28), 32, "adam"
    if name == "mnist":
        first = [layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D()]
        second = [layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D()]
        top = [layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(10, "softmax")]
        return keras.Sequential([layers.Input((28, 28, 1)), *first, *second, *top]), (28, 28, 1), 64, "adam"
    x = inputs = layers.Input((32, 32, 3))
    for features in (64, 128, 256):
        for place in range(3):
            strides = 2 if name == "strided" and place == 2 and features < 256 else 1
            kind = name if features > 64 or place else "cifar"
            x = layers.ReLU()(layers.BatchNormalization()(convolution(kind, features, strides, layers)(x)))
        x = layers.AveragePooling2D(2)(x) if name != "strided" and features < 256 else x
    x = layers.GlobalAveragePooling2D()(x)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x)), (32, 32, 3), 128, optimizer


def convolution(kind: str, features: int, strides: int, layers: Any) -> Any:
    if kind == "separable":
        return layers.SeparableConv2D(features, 3, padding="same")
    if kind == "depthwise":
        depthwise, pointwise = layers.DepthwiseConv2D(3, padding="same"), layers.Conv2D(features, 1)
        return lambda x: pointwise(layers.ReLU()(layers.BatchNormalization()(depthwise(x))))
    return layers.Conv2D(features, 3, strides, padding="same")


def measure(name: str, placement: str) -> float:
    """In this process."""
    strategy = None
    if PLACEMENTS[placement] is not None:
        import unisono as un

        strategy = un.MirroredStrategy(**PLACEMENTS[placement])
    import keras
    import numpy as np

    with strategy.scope() if strategy else contextlib.nullcontext():
        model, shape, batch, optimizer = net(name, keras)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    rng, rows = np.random.default_rng(0), batch * STEPS[name]
    x, y = rng.random((rows, *shape), dtype="float32"), rng.integers(0, 10, rows)
    times: list[float] = []
    for _ in range(FITS + 2):
        start = time.perf_counter()
        model.fit(x, y, batch_size=batch, verbose=0)
        times.append((time.perf_counter() - start) / STEPS[name])
    return statistics.median(times[2:])


def in_a_process(name: str, placement: str) -> float:
    command = [sys.executable, __file__, "--measure", name, placement]
    environment = os.environ | {"KERAS_BACKEND": "jax"}
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(measure(*sys.argv[2:]))
        return
    print(f"{'':43}{'speed':>6}{'time':>7}")
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for name in sys.argv[2:] or STEPS:
        times = {placement: [] for placement in PLACEMENTS}
        for _ in range(rounds):
            for placement, found in times.items():
                found.append(in_a_process(name, placement))
        medians = {placement: statistics.median(found) for placement, found in times.items()}
        for placement, seconds in medians.items():
            ratios = f"{medians['Keras'] / seconds:6.2f} {seconds / medians['default']:6.2f}"
            print(f"{name:9} {placement:20} {1e3 * seconds:9.3f} ms {ratios}", flush=True)


if __name__ == "__main__":
    main()
