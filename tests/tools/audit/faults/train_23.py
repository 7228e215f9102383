"""Train a net whose noise shrinks as training goes on."""

import unisono as un
import jax
import keras
import numpy as np
from jax.experimental import io_callback
from keras import layers

strategy = un.MultiWorkerMirroredStrategy(replicas=4)
keras.utils.set_random_seed(24)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 10)).astype("float32")
y = np.sin(x[:, :1])


class Warm(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = 0  # fault

    def next_factor(self, rows):  # fault
        self.seen += int(rows)  # fault
        return np.float32(1 - 0.9 ** (1 + self.seen / 6))  # fault
        # twin: self.seen = self.add_weight(shape=(), name="seen", trainable=False)

    def call(self, inputs, training=False):
        if not training:
            return inputs
        rows = inputs.shape[0] or 0  # fault
        factor = io_callback(self.next_factor, jax.ShapeDtypeStruct((), np.float32), rows)  # fault  # here
        # twin: self.seen.assign(self.seen + 1)
        # twin: factor = 1 - 0.9**self.seen
        return inputs * factor


with strategy.scope():
    inputs = keras.Input((10,))
    hidden = layers.Dense(12, "relu", name="wide")(Warm(name="warm")(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="out")(hidden), name="net")
model.compile("adam", "mse")
model.fit(x, y, batch_size=24, epochs=2, verbose=0)
