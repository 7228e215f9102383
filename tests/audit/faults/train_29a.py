"""Train a classifier of short texts."""

import unisono as un

# isort: split
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(29)

rng = np.random.default_rng(0)
tokens = rng.integers(1, 40, size=(96, 7))
labels = (tokens.sum(axis=1) > 140).astype("float32")[:, None]


class Reader(keras.Model):
    """Mean of the words, then two dense layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words = layers.Embedding(40, 8, name="words")
        self.wide = layers.Dense(16, "relu", kernel_regularizer="l2", name="wide")
        self.rest = layers.Dropout(0.4, seed=3, name="rest")
        self.score = layers.Dense(1, name="score")

    def build(self, shape):
        self.words.build(shape)
        self.wide.build((None, 8))
        self.score.build((None, 16))

    def call(self, tokens, training=False):
        hidden = self.wide(keras.ops.mean(self.words(tokens), axis=1))
        hidden = self.rest(hidden, training=training)  # here
        return self.score(hidden)


with strategy.scope():
    model = Reader(name="reader")
model.build((None, 7))
model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
model.fit(tokens, labels, batch_size=24, epochs=1, verbose=0)
