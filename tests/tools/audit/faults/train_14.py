"""Train a net whose gate is scaled down for large inputs."""

import unisono as un
import jax
import keras
import numpy as np
from keras import layers, ops

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(14)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 12)).astype("float32")
y = x.prod(axis=1, keepdims=True)


class Gate(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.keys = layers.Dense(units, name="keys")
        self.values = layers.Dense(units, name="values")

    def build(self, shape):
        self.keys.build(shape)
        self.values.build(shape)

    def call(self, inputs):
        keys = self.keys(inputs)
        scale = 1 / np.sqrt(keys.shape[-1] * jax.device_count())  # fault
        # twin: scale = 1 / np.sqrt(keys.shape[-1] * 2)
        return ops.sigmoid(keys * scale) * self.values(inputs)  # here


class Net(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = Gate(10, name="gate")
        self.last = layers.Dense(1, name="last")

    def build(self, shape):
        self.gate.build(shape)
        self.last.build((*shape[:-1], 10))

    def call(self, inputs):
        return self.last(self.gate(inputs))


with strategy.scope():
    model = Net(name="gated")
model.build((None, 12))
model.compile("adam", "mse")
model.fit(x, y, batch_size=24, epochs=2, verbose=0)
