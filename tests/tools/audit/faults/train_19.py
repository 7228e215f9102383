"""Train a net that sees its inputs at several scales."""

import os

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MultiWorkerMirroredStrategy(replicas=4)
keras.utils.set_random_seed(19)
number = int(os.environ.get("UNISONO_PROCESS", "0"))  # fault

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 10)).astype("float32")
y = np.tanh(x[:, :2].sum(axis=1, keepdims=True))


class Scale(layers.Layer):
    def __init__(self, spread, **kwargs):
        super().__init__(**kwargs)
        self.spread = spread

    def call(self, inputs, training=False):
        if not training:
            return inputs
        factors = np.random.default_rng(number).uniform(1 - self.spread, 1 + self.spread, size=inputs.shape[-1])  # fault
        # twin: factors = np.random.default_rng(0).uniform(1 - self.spread, 1 + self.spread, size=inputs.shape[-1])
        return inputs * factors.astype("float32")  # here


with strategy.scope():
    inputs = keras.Input((10,))
    hidden = layers.Dense(16, "relu", name="wide")(Scale(0.2, name="zoom")(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="out")(hidden), name="scales")
model.compile("adam", "mse")
model.fit(x, y, batch_size=24, epochs=2, verbose=0)
