"""A process of its own: a fit with BackupAndRestore, which prints the fingerprint at the end and what each epoch has seen.

python train_and_be_killed.py DIRECTORY DEVICES
"""

import json
import sys
import time

import keras
import numpy as np
from keras import layers, ops

import unisono as un

directory, devices = sys.argv[1], int(sys.argv[2])
ROWS, BATCH, EPOCHS = 230, 10, 3


class Miscounted(keras.metrics.Metric):
    """How many rows of the epoch were not seen exactly once, so far; the labels carry the rows' numbers."""

    def __init__(self):
        super().__init__(name="miscounted")
        self.counts = self.add_variable((ROWS,), "zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.counts.assign_add(ops.sum(ops.one_hot(ops.cast(y_true[:, 1], "int32"), ROWS), axis=0))

    def result(self):
        return ops.sum(ops.cast(ops.not_equal(self.counts, 1.0), "float32"))


def loss(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true[:, 0], y_pred, from_logits=True)


class Slowly(keras.callbacks.Callback):
    """So that there is time to be killed."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)


strategy = un.MirroredStrategy(devices=devices, replicas=4)
keras.utils.set_random_seed(0)
with strategy.scope():
    hidden = [layers.Dense(64, "relu"), layers.BatchNormalization(), layers.Dropout(0.2)]
    model = keras.Sequential([layers.Input((8,)), *hidden, layers.Dense(3)])
    optimizer, metrics = keras.optimizers.Adam(0.01), [Miscounted()]
model.compile(optimizer, loss, metrics=metrics)
rng = np.random.default_rng(0)
x, y = rng.standard_normal((ROWS, 8)).astype("float32"), np.stack([rng.integers(0, 3, ROWS), np.arange(ROWS)], 1)
print("ready", flush=True)
backup = un.callbacks.BackupAndRestore(directory, save_freq=3)
history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[backup, Slowly()])
print(
    json.dumps(
        {"bits": un.fingerprint(model), "steps": int(optimizer.iterations.value), "miscounted": history.history["miscounted"]}
    )
)
