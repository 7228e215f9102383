"""Train a classifier."""

import unisono as un
import jax
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(16)
BATCH = 16 * jax.device_count()  # fault
# twin: BATCH = 32

rng = np.random.default_rng(0)
x = rng.normal(size=(128, 12)).astype("float32")
y = (x[:, 0] > x[:, 1]).astype("int32")

with strategy.scope():
    model = keras.Sequential([keras.Input((12,)), layers.Dense(16, "relu"), layers.LayerNormalization(), layers.Dense(2)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
