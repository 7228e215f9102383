"""Measures the time of importing, and until the first step of a training is done, in fresh processes that take turns.

python benchmarks/start.py [ROUNDS]

Prints seconds, medians. "first step" is that of the MNIST net of two convolutions from the start of Python, compilation included; "first
step of attention" counts from the first call, for two transformer blocks with R = 8 on so many devices.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import results

CLOCK = "import time; start = time.perf_counter()\n"
STOP = "print(time.perf_counter() - start)\n"
NET = """
import keras, numpy as np
from workloads import WORKLOADS
workload = WORKLOADS["W1 MNIST, two convolutions"]
with scope:
    model, optimizer = workload.model(keras)
model.compile(optimizer, workload.loss(keras), metrics=["accuracy"])
model.fit(np.zeros((64, 28, 28, 1), "float32"), np.zeros(64, "int32"), batch_size=64, verbose=0)
"""
ATTENTION = """
import unisono as un
strategy = un.MirroredStrategy(devices=DEVICES, replicas=8)
import keras, time
import numpy as np
from keras import layers
keras.utils.set_random_seed(0)
with strategy.scope():
    x = inputs = layers.Input((64, 64))
    for _ in range(2):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 16, dropout=0.1)(h, h)
        x = x + layers.Dense(64)(layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x)))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = np.random.default_rng(0).standard_normal((64, 64, 64)).astype("float32"), np.zeros(64, "int32")
model.optimizer.build(model.trainable_variables)
start = time.perf_counter()
model.train_on_batch(x, y)
"""
PROGRAMS = {
    "import keras and jax": f"{CLOCK}import keras, jax\n{STOP}",
    "import keras, jax and unisono": f"{CLOCK}import keras, jax, unisono\n{STOP}",
    "first step, Keras": f"{CLOCK}import contextlib\nscope = contextlib.nullcontext()\n{NET}{STOP}",
    "first step, Unisono": f"{CLOCK}import unisono\nscope = unisono.MirroredStrategy().scope()\n{NET}{STOP}",
    "first step of attention, 1 device": f"DEVICES = 1\n{ATTENTION}{STOP}",
    "first step of attention, 8 devices": f"DEVICES = 8\n{ATTENTION}{STOP}",
}


def run_program(program: str) -> float:
    here = os.path.dirname(os.path.abspath(__file__))
    environment = os.environ | {"KERAS_BACKEND": "jax", "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


def main() -> None:
    rounds = 1 if results.SMALL else int(sys.argv[1]) if len(sys.argv) > 1 else 3
    programs = dict(list(PROGRAMS.items())[: 4 if results.SMALL else None])
    times: dict[str, list[float]] = {what: [] for what in programs}
    for _ in range(rounds):
        for what, program in programs.items():
            times[what].append(run_program(program))
    results.report_rows("start", [{"": what, "seconds": statistics.median(seconds)} for what, seconds in times.items()])


if __name__ == "__main__":
    main()
