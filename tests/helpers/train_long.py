"""A process of its own: many steps of a small model on so many CPU devices; prints the fingerprint at the end.

python train_long.py DEVICES STEPS ROWS
"""

import sys

import keras
import numpy as np
from keras import layers

import unisono as un

devices, steps, rows = map(int, sys.argv[1:])
strategy = un.MirroredStrategy(devices=devices, replicas=8)
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential(
        [layers.Input((8,)), layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dropout(0.1), layers.Dense(3)]
    )
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
rng = np.random.default_rng(0)
x, y = rng.standard_normal((50 * rows, 8)).astype("float32"), rng.integers(0, 3, 50 * rows)
model.fit(x, y, batch_size=rows, epochs=steps // 50, verbose=0)
print(int(model.optimizer.iterations.value), un.fingerprint(model))
