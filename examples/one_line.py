"""Three kinds of Keras model on three placements: one line changes where they train, and nothing changes in what they learn.

Run it with `python examples/one_line.py`; the fingerprints of each kind of model are equal.
"""

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
import numpy as np
from keras import layers


def sequential():
    return keras.Sequential([
        keras.Input((2,)),
        layers.Dense(16, activation="relu"),
        layers.Dropout(0.1),
        layers.Dense(2),
    ])  # fmt: skip


def functional():
    point = keras.Input((2,))
    x = layers.Dense(16, activation="tanh")(point)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return keras.Model(point, layers.Dense(2)(layers.concatenate([point, x])))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(16, activation="gelu")
        self.norm = layers.LayerNormalization()
        self.logits = layers.Dense(2)

    def call(self, point):
        return self.logits(self.norm(self.hidden(point)))


# Two rings of points. Their number is no multiple of 64: the last batch is smaller than the others.
rng = np.random.default_rng(0)
label = rng.integers(0, 2, 500)
angle = rng.uniform(0, 2 * np.pi, 500)
radius = 1 + label + 0.2 * rng.normal(size=500)
point = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype("float32")


def train(make, strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
    model.compile(
        optimizer=keras.optimizers.Adam(0.02),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(point, label, batch_size=64, epochs=10, verbose=0)
    _, accuracy = model.evaluate(point, label, batch_size=100, verbose=0)
    predicted = model.predict(point, batch_size=500, verbose=0).argmax(axis=1)
    print(f"  {make.__name__:<10}  evaluate {accuracy:.1%}  predict {np.mean(predicted == label):.1%}  {un.fingerprint(model)}")


for strategy in (
    un.MirroredStrategy(devices=4, replicas=4),  # first, because it makes four CPU devices where there is no GPU
    un.MirroredStrategy(devices=2, replicas=4),
    un.OneDeviceStrategy(replicas=4),
):
    print(strategy)
    for make in (sequential, functional, Subclassed):
        train(make, strategy)
