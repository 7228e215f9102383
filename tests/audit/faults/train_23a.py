"""Train a net that pools the codes of its inputs."""

import unisono as un

# isort: split
import keras
import numpy as np
from keras import layers, ops

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(23)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8)).astype("float32")
y = x[:, :1] * 0.5 + x[:, 2:3]


class Spread(layers.Layer):
    """Divide by the root of the size."""

    def call(self, inputs):
        size = ops.cast(ops.shape(inputs)[0], inputs.dtype)  # here
        return inputs / ops.sqrt(size)


with strategy.scope():
    inputs = keras.Input((8,))
    hidden = Spread(name="even")(layers.Dense(12, "relu", name="wide")(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="out")(hidden), name="roots")
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, y, batch_size=24, epochs=1, verbose=0)
