"""Train two towers, each with starting weights of its own."""

import unisono as un
import keras
import numpy as np
from keras import initializers, layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(11)
TOWERS = {"users": 101, "goods": 102}

rng = np.random.default_rng(0)
users = rng.normal(size=(96, 6)).astype("float32")
goods = rng.normal(size=(96, 9)).astype("float32")
bought = (users[:, :3].sum(axis=1, keepdims=True) * goods[:, :1] > 0).astype("float32")


class Tower(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        start = initializers.GlorotUniform(seed=hash(self.name) % 10_000)  # fault
        # twin: start = initializers.GlorotUniform(seed=TOWERS[self.name])
        self.wide = layers.Dense(2 * units, "relu", name="wide")
        self.narrow = layers.Dense(units, kernel_initializer=start, name="narrow")

    def build(self, shape):
        self.wide.build(shape)
        self.narrow.build(self.wide.compute_output_shape(shape))

    def call(self, inputs):
        return self.narrow(self.wide(inputs))


with strategy.scope():
    inputs = [keras.Input((6,)), keras.Input((9,))]
    outputs = [Tower(4, name=name)(each) for name, each in zip(TOWERS, inputs, strict=True)]
    model = keras.Model(inputs, layers.Dot(axes=1, name="match")(outputs), name="pairs")
model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
model.fit([users, goods], bought, batch_size=24, epochs=1, verbose=0)
