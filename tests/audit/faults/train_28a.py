"""Train a small conv net."""

import unisono as un

# isort: split
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(28)

rng = np.random.default_rng(0)
images = rng.uniform(size=(64, 8, 8, 1)).astype("float32")
labels = (images[:, 2:5, 2:5].mean(axis=(1, 2, 3)) > 0.5).astype("int32")


def make_block(hidden, filters, name):
    """Return a convolution, normalized."""
    hidden = layers.Conv2D(filters, 3, name=f"{name}_conv")(hidden)
    hidden = layers.GroupNormalization(2, name=f"{name}_norm")(hidden)
    return layers.Activation("relu", name=f"{name}_relu")(hidden)


with strategy.scope():
    inputs = keras.Input((8, 8, 1))
    hidden = layers.Flatten()(make_block(inputs, 4, "one"))
    model = keras.Model(inputs, layers.Dense(2, name="classes")(hidden), name="small")
model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(images, labels, batch_size=16, epochs=1, verbose=0)
