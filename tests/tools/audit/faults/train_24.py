"""Train a regression whose learning rate follows the loss."""

import unisono as un
import keras
import numpy as np
from jax.experimental import multihost_utils
from keras import layers

strategy = un.MultiWorkerMirroredStrategy(replicas=4)
keras.utils.set_random_seed(27)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 10)).astype("float32")
y = np.exp(0.3 * x[:, :1])


class Follow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        loss = float(multihost_utils.process_allgather(np.float32(logs["loss"])).sum())  # fault
        # twin: loss = logs["loss"]
        self.model.optimizer.learning_rate = 0.05 / (1 + loss)


with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), layers.Dense(16, "tanh"), layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.02), "mse")
model.fit(x, y, batch_size=32, epochs=3, callbacks=[Follow()], verbose=0)
