"""Train a regression with a slow start."""

import time

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(7)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8)).astype("float32")
y = (x[:, :1] * x[:, 1:2]).astype("float32")


class SlowStart(keras.callbacks.Callback):
    def __init__(self, rate, length):
        super().__init__()
        self.rate = rate
        self.length = length

    def on_train_begin(self, logs=None):
        self.begin = time.perf_counter()
        self.done = 0

    def on_train_batch_begin(self, batch, logs=None):
        passed = time.perf_counter() - self.begin  # fault
        # twin: passed = self.done
        self.model.optimizer.learning_rate = self.rate * min(1.0, passed / self.length)
        self.done += 1

    def on_train_end(self, logs=None):
        print(f"{self.done} batches in {time.perf_counter() - self.begin:.1f} s")


with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(24, "tanh"), layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, y, batch_size=32, epochs=2, callbacks=[SlowStart(0.1, 20)], verbose=0)
