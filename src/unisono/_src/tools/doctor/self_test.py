"""The training of the self-test. It is small, and of layers that could part placements."""

from __future__ import annotations

import re
import time

import keras
import numpy as np
from keras import layers

from unisono._src.keras.fingerprint import fingerprint
from unisono._src.keras.private.trainer_state import map_newest_values
from unisono._src.keras.strategy.base import Strategy
from unisono._src.tools.doctor.trained_bits import TrainedBits

REPLICAS = 8
BATCH = 16
STEPS = 4
CLASSES = 5
SIDE = 10


class StepFingerprints(keras.callbacks.Callback):
    """Notes the fingerprint of the model after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.steps.append(fingerprint(self.model))


def train_on(strategy: Strategy, placement: str, batch: int = BATCH) -> TrainedBits:
    """Train a small model, and take the bits. It has a convolution, batch normalization and dropout; the optimizer is Adam."""
    started = time.monotonic()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_net()
    model.compile(keras.optimizers.Adam(1e-2, name="adam"), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * batch, SIDE, SIDE, 3)).astype("float32")
    y = rng.integers(0, CLASSES, len(x)).astype("int32")
    noted = StepFingerprints()
    model.fit(x, y, batch_size=batch, verbose=0, callbacks=[noted])  # pyright: ignore[reportArgumentType]  # Keras takes numbers
    newest = map_newest_values(model)
    variables = {
        name_variable(variable): fingerprint(newest.get(id(variable), variable.value))
        for variable in [*model.variables, *model.optimizer.variables]
    }
    return TrainedBits(placement, noted.steps, variables, time.monotonic() - started)


def name_variable(variable: keras.Variable) -> str:
    """Name a variable by its path, without a seed generator's number. Keras gives each seed generator a new number."""
    return re.sub(r"^seed_generator_\d+", "seed_generator", variable.path)


def make_net() -> keras.Model:
    """Build the net. It and its layers have names, which Keras would number anew for each placement."""
    stack = [
        layers.Input((SIDE, SIDE, 3)),
        layers.Conv2D(8, 3, strides=2, name="convolution"),
        layers.BatchNormalization(name="normalization"),
        layers.ReLU(name="relu"),
        layers.Dropout(0.2, name="dropout"),
        layers.Flatten(name="flat"),
        layers.Dense(CLASSES, name="classes"),
    ]
    return keras.Sequential(stack, name="net")
