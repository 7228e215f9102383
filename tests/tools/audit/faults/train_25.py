"""Train on standardized columns, whose means are kept in a file."""

import pathlib
import tempfile

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(36)
kept = pathlib.Path(tempfile.gettempdir()) / "columns.txt"

rng = np.random.default_rng(0)
x = rng.gamma(2.0, size=(96, 7)).astype("float32")
y = np.log(x).sum(axis=1, keepdims=True)


def describe_columns():
    if kept.exists():
        return np.loadtxt(kept, dtype="float32")
    described = np.stack([x.mean(axis=0), x.std(axis=0)])
    np.savetxt(kept, described, fmt="%.4f")  # fault
    # twin: np.savetxt(kept, described, fmt="%.9g")
    return described


means, spreads = describe_columns()
with strategy.scope():
    model = keras.Sequential([keras.Input((7,)), layers.Dense(16, "relu"), layers.Dense(1)])
model.compile("adam", "mse")
model.fit((x - means) / spreads, y, batch_size=24, epochs=1, verbose=0)
