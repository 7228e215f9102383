"""Memory of a step of the CIFAR net, batch 128, on one device: R = 16 against R = 1 and against Keras' gradient_accumulation_steps=16.

python benchmarks/memory.py [ROUNDS]

Prints megabytes, medians over processes: the arrays that are held between steps (weights, what the optimizer keeps, sums), what a process
holds more at most in a step, and what it holds between steps with all its code, when the C library has given back what is free. The
bound is weights and momentum, a quarter of what R = 1 needs in a step beside its gradient, and (log2 R + 2) gradients.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import results
from workloads import WORKLOADS

WORKLOAD = WORKLOADS["W3 MLP, batch 32" if results.SMALL else "W2 CIFAR"]
REPLICAS = 16
KINDS = ("R = 1", f"R = {REPLICAS}", f"Keras, {REPLICAS} accumulated steps", "Keras, one batch")
MB = 1e6


def read_status(field: str) -> float:
    """Return a field of the status of this process, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / MB


def measure_kind(kind: str) -> tuple[float, float, float, float]:
    """Return four sizes in MB: arrays, what a step needs more at most, the process between steps, and a gradient."""
    batch = WORKLOAD.batch
    accumulated = {}
    if kind.startswith("R"):
        import unisono as un

        scope: Any = un.OneDeviceStrategy(replicas=int(kind.split()[-1])).scope()
    else:
        import contextlib

        scope = contextlib.nullcontext()
        if "accumulated" in kind:
            batch = max(1, batch // REPLICAS)
            accumulated = {"gradient_accumulation_steps": REPLICAS}
    import jax
    import keras

    with scope:
        model, _ = WORKLOAD.model(keras)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **accumulated)
    model.compile(optimizer, WORKLOAD.loss(keras), metrics=["accuracy"])
    x, y = WORKLOAD.data()
    for _ in range(2):
        model.fit(x, y, batch_size=batch, verbose=0)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what compiling has left behind
    before = read_status("VmRSS")
    arrays = sum(array.nbytes for array in jax.live_arrays()) / MB
    Path("/proc/self/clear_refs").write_text("5")  # the highest is counted anew
    model.fit(x, y, batch_size=batch, verbose=0)
    gradient = sum(v.value.nbytes for v in model.trainable_variables) / MB
    return arrays, read_status("VmHWM") - before, before, gradient


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(*measure_kind(sys.argv[2]))
        return
    rounds = 1 if results.SMALL else int(sys.argv[1]) if len(sys.argv) > 1 else 1
    times: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    environment = os.environ | {"KERAS_BACKEND": "jax"}
    for _ in range(rounds):
        for kind, measurements in times.items():
            command = [sys.executable, __file__, "--measure", kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            measurements.append([float(word) for word in done.stdout.splitlines()[-1].split()])
    medians = {
        kind: [statistics.median(values) for values in zip(*measurements, strict=True)] for kind, measurements in times.items()
    }
    gradient = medians["R = 1"][3]
    bound = 2 * gradient + (medians["R = 1"][1] - gradient) / 4 + (math.log2(REPLICAS) + 2) * gradient
    rows = [
        {"": kind, "arrays, MB": arrays, "in a step, MB more": more, "together, MB": arrays + more, "process, MB": process}
        for kind, (arrays, more, process, _) in medians.items()
    ]
    results.report_rows("memory", [*rows, {"": f"bound for R = {REPLICAS}", "together, MB": bound}])


if __name__ == "__main__":
    main()
