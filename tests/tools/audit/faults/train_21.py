"""Train on a stream of records."""

import unisono as un
import jax
import keras
import numpy as np
from keras import layers

strategy = un.MultiWorkerMirroredStrategy(replicas=4)
keras.utils.set_random_seed(21)

rng = np.random.default_rng(0)
records = rng.normal(size=(192, 9)).astype("float32")


def read_records():
    for first in range(0, 96, 24):
        rows = records[jax.process_index() :: jax.process_count()][first : first + 24]  # fault
        # twin: rows = records[first : first + 24]
        yield rows[:, 1:], rows[:, :1]


with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(1)])
model.compile("adam", "mse")
model.fit(read_records(), steps_per_epoch=4, epochs=1, shuffle=False, verbose=0)
print(f"process {jax.process_index()} of {jax.process_count()} has trained")
