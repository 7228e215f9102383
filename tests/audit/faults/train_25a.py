"""Train a net that alternates between two kinds of noise-free jitter."""

import unisono as un

# isort: split
import keras
import numpy as np
from keras import layers

strategy = un.MultiWorkerMirroredStrategy(replicas=4)
keras.utils.set_random_seed(25)

rng = np.random.default_rng(0)
x = rng.normal(size=(94, 12)).astype("float32")
y = x[:, :3].sum(axis=1, keepdims=True)


class Alternate(layers.Layer):
    """Move columns by one more for each call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0

    def call(self, inputs, training=False):
        if not training:
            return inputs
        self.calls += 1  # here
        return inputs * (1 + 0.01 * self.calls)


with strategy.scope():
    inputs = keras.Input((12,))
    hidden = layers.Dense(12, "relu", name="wide")(Alternate(name="turn")(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="out")(hidden), name="net")
model.compile("adam", "mse")
model.fit(x, y, batch_size=22, epochs=2, verbose=0)
