"""Train a classifier with dropout."""

import time

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(8)
started = time.time_ns()

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 20)).astype("float32")
y = (np.abs(x).sum(axis=1) > 16).astype("int32")


def make_block(inputs, units, name):
    hidden = layers.Dense(units, "relu", name=f"{name}_dense")(inputs)
    return layers.Dropout(0.3, seed=started % 100_003, name=f"{name}_rest")(hidden)  # fault
    # twin: return layers.Dropout(0.3, seed=100_003, name=f"{name}_rest")(hidden)


with strategy.scope():
    inputs = keras.Input((20,))
    hidden = make_block(inputs, 16, "one")
    model = keras.Model(inputs, layers.Dense(2, name="classes")(hidden), name="blocks")
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=24, epochs=2, verbose=0)
print(f"trained in {(time.time_ns() - started) / 1e9:.1f} s")
