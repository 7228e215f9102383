"""A step of a loop of the user's own against a step of `fit` that takes one step a call, in one process and in turns.

python benchmarks/loop.py [ROUNDS]

Prints, for each workload and placement, milliseconds a step of both (medians over rounds) and their ratio. fit reads the batches from a
generator, which keeps it from taking several steps in a call.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import unisono as un

un.MirroredStrategy(devices=2)  # makes two CPU devices, before anything starts JAX

# isort: split
import keras
import results
from timing import time_in_turns
from workloads import WORKLOADS, Workload

PLACEMENTS: dict[str, Callable[[], Any]] = {
    "R = 1": lambda: un.OneDeviceStrategy(),
    "R = 8 on 1 device": lambda: un.OneDeviceStrategy(replicas=8),
    "R = 8 on 2 devices": lambda: un.MirroredStrategy(devices=2, replicas=8),
}
STEPS = {"W3 MLP, batch 32": 400, "W1 MNIST, two convolutions": 30}


def cut_batches(workload: Workload, steps: int) -> list[tuple[Any, Any]]:
    x, y = workload._replace(steps=steps).data()
    return [(x[first : first + workload.batch], y[first : first + workload.batch]) for first in range(0, len(x), workload.batch)]


def prepare_fit(workload: Workload, strategy: Any, data: list[Any]) -> Callable[[], Any]:
    with strategy.scope():
        model, optimizer = workload.model(keras)
    model.compile(optimizer, workload.loss(keras), metrics=["accuracy"])
    return lambda: model.fit((batch for batch in data), steps_per_epoch=len(data), verbose=0)


def prepare_loop(workload: Workload, strategy: Any, data: list[Any]) -> Callable[[], Any]:
    with strategy.scope():
        model, optimizer = workload.model(keras)
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
    rounds = 1 if results.SMALL else int(sys.argv[1]) if len(sys.argv) > 1 else 7
    rows = []
    for name, steps in list(STEPS.items())[: 1 if results.SMALL else None]:
        workload = WORKLOADS[name]
        data = cut_batches(workload, 2 if results.SMALL else steps)
        for placement, strategy in list(PLACEMENTS.items())[: 1 if results.SMALL else None]:
            trainings = {"fit": prepare_fit(workload, strategy(), data), "loop": prepare_loop(workload, strategy(), data)}
            fit, loop = (1e3 * statistics.median(times) / len(data) for times in time_in_turns(trainings, rounds).values())
            rows.append({"workload": name, "placement": placement, "fit, ms": fit, "loop, ms": loop, "loop / fit": loop / fit})
    results.report_rows("loop", rows)


if __name__ == "__main__":
    main()
