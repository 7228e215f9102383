"""Train a model whose loss weighs its examples."""

import unisono as un

# isort: split
import keras
import numpy as np
from keras import layers, ops

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(26)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8)).astype("float32")
y = x[:, :1] * 0.5 + x[:, 2:3]
weights = rng.gamma(0.5, size=96).astype("float32")


class Weighted(keras.Model):
    """A model with a loss of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        values = ops.squeeze((y - y_pred) ** 2, -1)
        if sample_weight is None:
            return ops.mean(values)
        return ops.mean(values * sample_weight)


with strategy.scope():
    inputs = keras.Input((8,))
    hidden = layers.Dense(12, "relu", name="wide")(inputs)
    model = Weighted(inputs, layers.Dense(1, name="out")(hidden), name="weighted")
model.compile(keras.optimizers.SGD(0.1))
model.fit(x, y, sample_weight=weights, batch_size=24, epochs=1, verbose=0)
