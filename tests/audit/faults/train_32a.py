"""Train codes that are spread out, by a loss of a layer."""

import unisono as un

# isort: split
import keras
import numpy as np
from keras import layers, ops

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(32)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 10)).astype("float32")


class Spread(layers.Layer):
    """Pass codes on, and ask that they have size one."""

    def __init__(self, weight, **kwargs):
        super().__init__(**kwargs)
        self.weight = weight

    def call(self, codes):
        sizes = ops.std(codes, axis=0)  # here
        self.add_loss(self.weight * ops.mean((sizes - 1) ** 2))
        return codes


with strategy.scope():
    inputs = keras.Input((10,))
    codes = layers.Dense(4, name="encode")(inputs)
    codes = Spread(0.5, name="spread")(codes)
    model = keras.Model(inputs, layers.Dense(10, name="decode")(codes), name="coder")
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, x, batch_size=24, epochs=1, verbose=0)
