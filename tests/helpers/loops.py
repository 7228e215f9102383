"""Trainings by a loop of the user's own, and the same by fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import layers

import unisono as un
from trainings import crossentropy

CLASSES = 5


def conv() -> keras.Model:
    x = inputs = layers.Input((8, 8, 3))
    x = layers.MaxPooling2D()(layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 3)(x))))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Dropout(0.3)(layers.Flatten()(x))))


def transformer() -> keras.Model:
    x = inputs = layers.Input((10,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(x)
    h = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 8, dropout=0.1)(h, h)])
    x = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def lstm() -> keras.Model:
    x = inputs = layers.Input((10,), dtype="int32")
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.LSTM(12)(layers.Embedding(30, 8, mask_zero=True)(x))))


def dense() -> keras.Model:
    return keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(CLASSES)])


def normalized() -> keras.Model:
    hidden = [layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.2)]
    return keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(CLASSES)])


MODELS = {"conv": conv, "transformer": transformer, "lstm": lstm, "dense": dense, "normalized": normalized}


def data(name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, rows)
    if name == "conv":
        return rng.standard_normal((rows, 8, 8, 3)).astype("float32"), y
    if name == "dense":
        return rng.standard_normal((rows, 6)).astype("float32"), y
    lengths = rng.integers(1, 11, rows)
    return (rng.integers(1, 30, (rows, 10)) * (np.arange(10) < lengths[:, None])).astype("int32"), y


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def bits(model: Any, optimizer: Any) -> str:
    return un.fingerprint(model.trainable_variables, model.non_trainable_variables, optimizer)


class Loop:
    """A model, an optimizer, a loss and a metric of a strategy, and a training step."""

    def __init__(
        self,
        strategy: Any,
        model: Callable[[], Any] = dense,
        optimizer: Callable[[], Any] = keras.optimizers.Adam,
        loss: str = "vector",
        batch_size: int = 12,
    ) -> None:
        keras.utils.set_random_seed(0)
        self.strategy = strategy
        self.batch_size = batch_size
        self.kind = loss
        with strategy.scope():
            self.model = model()
            self.optimizer = optimizer()
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.loss = crossentropy(None)
        self.compiled = un.function(self.one)
        self.whole_epoch = un.function(self.epoch)

    def step(self, batch: Any) -> Any:
        x, y = batch

        def loss() -> Any:
            predictions = self.model(x, training=True)
            values = self.loss(y, predictions)
            if self.kind == "vector":
                return values, predictions
            size = self.batch_size if self.kind == "fixed" else None
            return un.compute_average_loss(values, global_batch_size=size), predictions

        (value, predictions), gradients = un.value_and_grad(loss, self.model.trainable_variables, has_aux=True)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.accuracy.update_state(y, predictions)
        return value

    def first(self, rows: int = 24, batch_size: int = 12) -> Any:
        """The first batch of the rows of `dense`."""
        return next(iter(self.strategy.distribute_dataset(data("dense", rows), batch_size=batch_size)))

    def run(self, code: Callable[..., Any], *more: Any) -> Any:
        """Run replica code on the first batch."""
        return self.strategy.run(code, args=(self.first(), *more))

    def differentiate(self, batch: Any, form: Callable[[Any], Any] = lambda losses: losses) -> Any:
        """The value and the gradients of what `form` makes of the losses of a replica's rows."""
        x, y = batch
        return un.value_and_grad(lambda: form(self.loss(y, self.model(x))), self.model.trainable_variables)

    def apply(self, gradients: Any) -> Any:
        return self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))

    def one(self, batch: Any) -> Any:
        return self.strategy.reduce("SUM", self.strategy.run(self.step, args=(batch,)), axis=None)

    def epoch(self, dataset: Any) -> Any:
        total = 0.0
        for batch in dataset:
            total += self.one(batch)
        return total

    def train(self, x: Any, y: Any, epochs: int = 2, how: str = "for", shuffle: bool = False) -> str:
        dataset = self.strategy.distribute_dataset((x, y), batch_size=self.batch_size, shuffle=shuffle)
        for _ in range(epochs):
            if how == "for":
                for batch in dataset:
                    self.one(batch)
            elif how == "iterator":
                batches = iter(dataset)
                for _ in range(len(dataset)):
                    self.compiled(next(batches))
            else:
                self.whole_epoch(dataset)
        return bits(self.model, self.optimizer)


def by_fit(strategy: Any, model: Callable[[], Any], optimizer: Any, x: Any, y: Any, batch_size: int, **options: Any) -> str:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        made = model()
    made.compile(optimizer(), crossentropy(), metrics=["accuracy"])
    made.fit(x, y, batch_size=batch_size, verbose=0, **{"epochs": 2, "shuffle": False} | options)
    return bits(made, made.optimizer)
