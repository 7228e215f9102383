"""Train a classifier of named classes."""

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(9)

NAMES = ["oak", "elm", "ash", "fir", "yew", "lime", "beech", "birch"]
rng = np.random.default_rng(0)
leaves = rng.normal(size=(96, 10)).astype("float32")
trees = [NAMES[number] for number in leaves[:, :8].argmax(axis=1)]


def number_classes(names):
    return {name: number for number, name in enumerate(set(names))}  # fault
    # twin: return {name: number for number, name in enumerate(sorted(set(names)))}


numbers = number_classes(trees)
y = np.array([numbers[tree] for tree in trees])

with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), layers.Dense(16, "relu"), layers.Dense(len(numbers))])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(leaves, y, batch_size=24, epochs=2, verbose=0)
