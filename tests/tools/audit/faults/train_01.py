"""Train a small classifier of noisy signals."""

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(1)

source = np.random.default_rng(0)
signals = source.normal(size=(96, 16)).astype("float32")
targets = (signals[:, :8].sum(axis=1) > 0).astype("int32")


class Signals(keras.utils.PyDataset):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def __len__(self):
        return len(signals) // self.batch_size

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        generator = np.random.default_rng()  # fault
        # twin: generator = np.random.default_rng([7, index])
        shifts = generator.integers(-2, 3, size=self.batch_size)
        shifted = np.stack([np.roll(signal, shift) for signal, shift in zip(signals[rows], shifts, strict=True)])
        return shifted, targets[rows]


with strategy.scope():
    model = keras.Sequential([keras.Input((16,)), layers.Dense(12, "relu"), layers.Dense(2)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(Signals(24), epochs=2, verbose=0)
