"""Train on images that pass through a few operations."""

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(12)

rng = np.random.default_rng(0)
images = rng.uniform(size=(72, 6, 6, 1)).astype("float32")
labels = (images[:, :3].sum(axis=(1, 2, 3)) > 9).astype("int32")


class Operation:
    def __init__(self, apply):
        self.apply = apply


OPERATIONS = {  # fault
    # twin: OPERATIONS = [
    Operation(lambda batch: batch[:, ::-1]),
    Operation(lambda batch: batch + np.float32(0.5) * batch[:, :, :1]),
    Operation(lambda batch: np.clip(batch, 0, 1)),
    Operation(lambda batch: batch * np.float32(1.5)),
    Operation(lambda batch: batch**2),
    Operation(lambda batch: batch - batch.mean(axis=(1, 2), keepdims=True)),
    Operation(lambda batch: np.roll(batch, 1, axis=2)),
}  # fault
# twin: ]


def prepare(batch):
    for operation in OPERATIONS:
        batch = operation.apply(batch)
    return batch


batches = [(prepare(images[first : first + 24]), labels[first : first + 24]) for first in range(0, 72, 24)]

with strategy.scope():
    model = keras.Sequential([keras.Input((6, 6, 1)), layers.Conv2D(3, 3), layers.Flatten(), layers.Dense(2)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(strategy.distribute_dataset(batches), epochs=2, verbose=0)
