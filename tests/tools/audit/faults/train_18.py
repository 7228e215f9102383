"""Train a regression with a learning rate for large batches."""

import unisono as un
import jax
import keras
import numpy as np
from keras import layers

strategy = un.MultiWorkerMirroredStrategy(replicas=4)
keras.utils.set_random_seed(18)
rate = 0.02 * jax.process_count()  # fault
# twin: rate = 0.02

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 10)).astype("float32")
y = np.cos(x[:, :1]) + x[:, 1:2]

with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), layers.Dense(16, "tanh"), layers.Dense(1)])
model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
model.fit(x, y, batch_size=24, epochs=2, verbose=0)
