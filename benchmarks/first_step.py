"""How long the first step takes on one device and on eight, compilation included, in fresh processes.

python benchmarks/first_step.py [ROUNDS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

PROGRAM = """
import sys, time
import unisono as un
devices = int(sys.argv[1])
strategy = un.MirroredStrategy(devices=devices, replicas=8)
import keras
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
print(time.perf_counter() - start)
"""


def first_step(devices: int) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(devices)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"KERAS_BACKEND": "jax"},
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    times = {devices: [] for devices in (1, 8)}
    for _ in range(rounds):
        for devices, seconds in times.items():
            seconds.append(first_step(devices))
    one, eight = (statistics.median(seconds) for seconds in times.values())
    print(
        f"first step of two transformer blocks, R = 8: {one:.2f} s on one device, {eight:.2f} s on eight, ratio {eight / one:.2f}"
    )


if __name__ == "__main__":
    main()
