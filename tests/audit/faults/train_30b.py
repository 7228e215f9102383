"""Train a regression of standardized hidden values."""

import unisono as un

# isort: split
import keras
import numpy as np
from keras import layers, ops

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(30)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 9)).astype("float32")
y = x[:, :2].max(axis=1, keepdims=True)


class Standardize(layers.Layer):
    """Bring values to mean zero and scale them."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, inputs):
        center = ops.mean(inputs, axis=-1, keepdims=True)
        return self.scale * (inputs - center)


with strategy.scope():
    inputs = keras.Input((9,))
    hidden = layers.Dense(12, "tanh", name="wide")(inputs)
    hidden = Standardize(name="even")(hidden)
    model = keras.Model(inputs, layers.Dense(1, name="out")(hidden), name="regression")
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, y, batch_size=24, epochs=1, verbose=0)
