"""A small model that is trained batch by batch, for tests of single contributions."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

import unisono as un

REPLICAS = 6
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((16, 6)).astype("float32"), RNG.integers(0, 3, 16).astype("int32")
WEIGHTS = 53
"""Numbers of the weights, whose gradients are the first of a contribution."""


class Training:
    """The model in the scope of a strategy, always from the same start."""

    def __init__(self, strategy: un.Strategy) -> None:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            hidden = [layers.Dense(5, "relu"), layers.Dropout(0.2)]
            self.model = keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(3)])
        self.model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def step(self) -> None:
        self.model.train_on_batch(X, Y)
