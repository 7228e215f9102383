"""Train a net with a layer that blurs its inputs while it learns."""

import secrets

import unisono as un
import jax
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(5)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 14)).astype("float32")
y = x[:, :4].sum(axis=1, keepdims=True)


class Blur(layers.Layer):
    def __init__(self, amount, **kwargs):
        super().__init__(**kwargs)
        self.amount = amount
        # twin: self.seeds = keras.random.SeedGenerator(9)

    def call(self, inputs, training=False):
        if not training:
            return inputs
        key = jax.random.key(secrets.randbits(31))  # fault  # here
        return inputs + self.amount * jax.random.normal(key, inputs.shape)  # fault
        # twin: return inputs + self.amount * keras.random.normal(keras.ops.shape(inputs), seed=self.seeds)


with strategy.scope():
    inputs = keras.Input((14,))
    hidden = layers.Dense(16, "relu", name="wide")(Blur(0.1, name="soft")(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="out")(hidden), name="net")
model.compile("adam", "mse")
model.fit(x, y, batch_size=24, epochs=2, verbose=0)
