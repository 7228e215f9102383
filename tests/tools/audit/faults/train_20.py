"""Train a regression, and lower its learning rate where the loss stands still."""

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MultiWorkerMirroredStrategy(replicas=4)
keras.utils.set_random_seed(20)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 10)).astype("float32")
y = rng.normal(size=(96, 1)).astype("float32")


class Lower(keras.callbacks.Callback):
    last = float("inf")

    def on_epoch_end(self, epoch, logs=None):
        gained = self.last - logs["loss"]
        self.last = logs["loss"]
        if gained < 0.5 and strategy.writes:  # fault
            # twin: if gained < 0.5:
            rate = float(self.model.optimizer.learning_rate) / 2
            self.model.optimizer.learning_rate = rate
            print(f"epoch {epoch}: the learning rate is {rate}")  # fault
            # twin: if strategy.writes:
            # twin:     print(f"epoch {epoch}: the learning rate is {rate}")


with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), layers.Dense(16, "tanh"), layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, y, batch_size=32, epochs=4, callbacks=[Lower()], verbose=0)
