"""Train a small mixture of experts."""

import unisono as un
import jax
import keras
import numpy as np
from keras import layers, ops

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(15)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8)).astype("float32")
y = np.abs(x[:, :2]).sum(axis=1, keepdims=True)


class Experts(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.count = 2 * jax.local_device_count()  # fault
        # twin: self.count = 4
        self.kernel = self.add_weight(shape=(self.count, shape[-1], self.units), name="kernel")
        self.router = self.add_weight(shape=(shape[-1], self.count), name="router")

    def call(self, inputs):
        weights = ops.softmax(inputs @ self.router)
        outputs = ops.einsum("bi,eio->beo", inputs, self.kernel)
        return ops.einsum("be,beo->bo", weights, outputs)


with strategy.scope():
    inputs = keras.Input((8,))
    hidden = ops.relu(Experts(12, name="experts")(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="sum")(hidden), name="mix")
model.compile("adam", "mse")
model.fit(x, y, batch_size=24, epochs=1, verbose=0)
