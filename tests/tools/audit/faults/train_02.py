"""Train a regression, and shake its first layer between epochs to leave flat places."""

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(2)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 10)).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True))


class Shake(keras.callbacks.Callback):
    def __init__(self, layer, size):
        super().__init__()
        self.layer = layer
        self.size = size
        self.source = np.random.default_rng()  # fault
        # twin: self.source = np.random.default_rng(5)

    def on_epoch_end(self, epoch, logs=None):
        kernel, bias = self.layer.get_weights()
        step = self.source.normal(scale=self.size, size=kernel.shape)
        self.layer.set_weights([kernel + step.astype("float32"), bias])


with strategy.scope():
    inputs = keras.Input((10,))
    hidden = layers.Dense(16, "tanh", name="first")
    outputs = layers.Dense(1, name="last")(hidden(inputs))
    model = keras.Model(inputs, outputs, name="wave")
model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(x, y, batch_size=32, epochs=3, callbacks=[Shake(hidden, 0.01)], verbose=0)
