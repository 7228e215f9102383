"""A step of a loop of the user's own against a step of `fit` that takes one step a call, in one process and in turns.

python benchmarks/loop.py [ROUNDS]

Prints, for each net and placement, milliseconds a step of both (medians over rounds) and their ratio. fit reads the batches from a
generator, which keeps it from taking several steps in a call.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import unisono as un

un.MirroredStrategy(devices=2)  # makes two CPU devices, before anything starts JAX

# isort: split
import keras
import numpy as np
from against_keras import net

PLACEMENTS: dict[str, Callable[[], Any]] = {
    "R = 1": lambda: un.OneDeviceStrategy(),
    "R = 8 on 1 device": lambda: un.OneDeviceStrategy(replicas=8),
    "R = 8 on 2 devices": lambda: un.MirroredStrategy(devices=2, replicas=8),
}
STEPS = {"mlp": 400, "mnist": 30}


def batches(name: str) -> list[tuple[Any, Any]]:
    _, shape, batch, _ = net(name, keras)
    rng = np.random.default_rng(0)
    return [(rng.random((batch, *shape), dtype="float32"), rng.integers(0, 10, batch)) for _ in range(STEPS[name])]


def fitting(name: str, strategy: Any, data: list[Any]) -> Callable[[], Any]:
    with strategy.scope():
        model, _, _, optimizer = net(name, keras)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return lambda: model.fit((batch for batch in data), steps_per_epoch=len(data), verbose=0)


def looping(name: str, strategy: Any, data: list[Any]) -> Callable[[], Any]:
    with strategy.scope():
        model, _, _, _ = net(name, keras)
        optimizer = keras.optimizers.Adam()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def step(batch: Any) -> Any:
        x, y = batch

        def loss() -> Any:
            predictions = model(x, training=True)
            return loss_fn(y, predictions), predictions

        (value, predictions), gradients = un.value_and_grad(loss, model.trainable_variables, has_aux=True)
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(y, predictions)
        return value

    @un.function
    def one(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    dataset = strategy.distribute_dataset(data)

    def epoch() -> None:
        accuracy.reset_state()
        value = None
        for batch in dataset:
            value = one(batch)
        float(value), float(accuracy.result())  # waits for the last step, as fit does

    return epoch


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print(f"{'':27}{'fit':>10}{'loop':>13}{'ratio':>8}")
    for name in STEPS:
        data = batches(name)
        for placement, strategy in PLACEMENTS.items():
            trainings = {"fit": fitting(name, strategy(), data), "loop": looping(name, strategy(), data)}
            times: dict[str, list[float]] = {kind: [] for kind in trainings}
            for round_ in range(rounds + 2):
                for kind, train in trainings.items():
                    start = time.perf_counter()
                    train()
                    if round_ > 1:
                        times[kind].append((time.perf_counter() - start) / len(data))
            fit, loop = (statistics.median(times[kind]) for kind in ("fit", "loop"))
            print(f"{name:6} {placement:20}{1e3 * fit:8.3f} ms{1e3 * loop:10.3f} ms{loop / fit:8.2f}", flush=True)


if __name__ == "__main__":
    main()
