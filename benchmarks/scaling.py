"""What a step costs against the number of replicas, and against the size of the model, on one device and on two.

python benchmarks/scaling.py [ROUNDS]

Prints milliseconds a step of the same global batch, medians over fits that take turns. Models of 10^4 to 10^8 parameters are two layers
of one width, trained by plain SGD with R = 1, and with R = 8 on one device and on two.
"""

from __future__ import annotations

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
from timing import in_turns
from workloads import CLASSES, WORKLOADS, Workload, floats

NETS = ["W1 MNIST, two convolutions", "W4 transformer"]
MOST = {"W1 MNIST, two convolutions": 64, "W4 transformer": 32}
"""Replicas."""
SIZES = (4,) if results.SMALL else (4, 5, 6, 7, 8)
ROWS = 64


def dense(parameters: int) -> Workload:
    width = round(math.sqrt(parameters / 2))
    layers = keras.layers

    def model(keras: Any) -> tuple[Any, Any]:
        hidden = [layers.Dense(width, "relu") for _ in range(2)]
        return keras.Sequential([layers.Input((width,)), *hidden, layers.Dense(CLASSES, "softmax")]), keras.optimizers.SGD(1e-4)

    return Workload(ROWS, 50 if parameters < 10**7 else 2, 1, floats(width), model)


def fitting(workload: Workload, strategy: Any) -> Callable[[], Any]:
    with strategy.scope():
        model, optimizer = workload.model(keras)
    model.compile(optimizer, workload.loss(keras), metrics=["accuracy"])
    x, y = workload.data()
    return lambda: model.fit(x, y, batch_size=workload.batch, verbose=0)


def compared(workload: Workload, strategies: dict[str, Any], rounds: int) -> dict[str, float]:
    fits = {name: fitting(workload, strategy) for name, strategy in strategies.items()}
    return {f"{name}, ms": 1e3 * statistics.median(times) / workload.steps for name, times in in_turns(fits, rounds).items()}


def main() -> None:
    rounds = 1 if results.SMALL else int(sys.argv[1]) if len(sys.argv) > 1 else 5
    by_replicas, by_size = [], []
    for name in NETS[: 1 if results.SMALL else None]:
        for replicas in (1, 2) if results.SMALL else [2**n for n in range(MOST[name].bit_length())]:
            strategies = {"one device": un.OneDeviceStrategy(replicas=replicas)}
            if replicas > 1:
                strategies["two devices"] = un.MirroredStrategy(devices=2, replicas=replicas)
            by_replicas.append({"workload": name, "replicas": replicas} | compared(WORKLOADS[name], strategies, rounds))
            gc.collect()
    for size in SIZES:
        strategies = {
            "R = 1": un.OneDeviceStrategy(replicas=1),
            "R = 8 on one device": un.OneDeviceStrategy(replicas=8),
            "R = 8 on two devices": un.MirroredStrategy(devices=2, replicas=8),
        }
        by_size.append({"parameters": 10**size} | compared(dense(10**size), strategies, rounds))
        gc.collect()
    results.report("replicas", by_replicas)
    results.report("sizes", by_size)


if __name__ == "__main__":
    main()
