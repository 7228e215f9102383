"""Measures a step against the number of replicas, and against the size of the model, on one device and on two.

python benchmarks/scaling.py [ROUNDS]

Prints milliseconds a step of the same global batch, medians over fits that take turns. Models of 10^4 to 10^8 parameters are two layers
of one width, trained by plain SGD with R = 1, with R = 8 on one device and on two, and by Keras' own accumulation over eight batches. Of
the CIFAR net and its forms, R = 8 on one device is compared with one big batch.
"""

from __future__ import annotations

import contextlib
import gc
import math
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
from workloads import CLASSES, MORE, WORKLOADS, Workload, floats

NETS = ["W1 MNIST, two convolutions", "W4 transformer"]
REPLICAS = (1, 2, 8, 32)
AT_ONCE = 8
"""Replicas on one device, or batches that Keras adds up."""
SIZES = (4,) if results.SMALL else (4, 5, 6, 7, 8)
ROWS = 64


def make_dense(parameters: int) -> Workload:
    width = round(math.sqrt(parameters / 2))
    layers = keras.layers

    def model(keras: Any) -> tuple[Any, Any]:
        hidden = [layers.Dense(width, "relu") for _ in range(2)]
        return keras.Sequential([layers.Input((width,)), *hidden, layers.Dense(CLASSES, "softmax")]), keras.optimizers.SGD(1e-4)

    return Workload(ROWS, 50 if parameters < 10**7 else 10**8 // parameters, 1, floats(width), model)


def prepare_training(workload: Workload, strategy: Any) -> Callable[[], Any]:
    """Return what trains for an epoch; without a strategy, by Keras' own accumulation."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, optimizer = workload.model(keras)
    batch = workload.batch
    if not strategy:
        optimizer = type(optimizer).from_config(optimizer.get_config() | {"gradient_accumulation_steps": AT_ONCE})
        batch //= AT_ONCE
    model.compile(optimizer, workload.loss(keras), metrics=["accuracy"])
    x, y = workload.data()
    return lambda: model.fit(x, y, batch_size=batch, verbose=0)


def compare_strategies(workload: Workload, strategies: dict[str, Any], rounds: int) -> dict[str, float]:
    fits = {name: prepare_training(workload, strategy) for name, strategy in strategies.items()}
    return {f"{name}, ms": 1e3 * statistics.median(times) / workload.steps for name, times in time_in_turns(fits, rounds).items()}


def compare_with_one_batch(name: str, rounds: int) -> results.Row:
    """Return what a step takes as one batch and as eight replicas one after another."""
    strategies = {"one batch": un.OneDeviceStrategy(replicas=1), "R = 8 on one device": un.OneDeviceStrategy(replicas=AT_ONCE)}
    milliseconds = compare_strategies((WORKLOADS | MORE)[name], strategies, rounds)
    one, several = milliseconds.values()
    return {"workload": name} | milliseconds | {"to one batch": several / one}


def main() -> None:
    rounds = 1 if results.SMALL else int(sys.argv[1]) if len(sys.argv) > 1 else 3
    by_replicas = []
    by_size = []
    by_net = []
    for name in NETS[: 1 if results.SMALL else None]:
        for replicas in REPLICAS[: 2 if results.SMALL else None]:
            strategies = {"one device": un.OneDeviceStrategy(replicas=replicas)}
            if replicas > 1:
                strategies["two devices"] = un.MirroredStrategy(devices=2, replicas=replicas)
            by_replicas.append({"workload": name, "replicas": replicas} | compare_strategies(WORKLOADS[name], strategies, rounds))
            gc.collect()
    results.report_rows("replicas", by_replicas)
    for name in ["W3 MLP, batch 32"] if results.SMALL else ["W2 CIFAR", *MORE]:
        by_net.append(compare_with_one_batch(name, rounds))
        gc.collect()
    results.report_rows("one batch", by_net)
    for size in SIZES:
        strategies = {
            "R = 1": un.OneDeviceStrategy(replicas=1),
            "R = 8 on one device": un.OneDeviceStrategy(replicas=AT_ONCE),
            "R = 8 on two devices": un.MirroredStrategy(devices=2, replicas=AT_ONCE),
            "Keras, 8 accumulated steps": None,
        }
        by_size.append({"parameters": 10**size} | compare_strategies(make_dense(10**size), strategies, rounds))
        gc.collect()
    results.report_rows("sizes", by_size)


if __name__ == "__main__":
    main()
