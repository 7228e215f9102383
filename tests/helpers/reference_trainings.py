"""Twelve small trainings whose fingerprints are kept: one for each part of the engine that could move bits.

python reference_trainings.py '[1, 2]' trains all of them on one device and on two, and prints the fingerprints as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

import unisono as un  # before keras, so that Keras runs on JAX

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)

import keras
import numpy as np
from keras import layers

REPLICAS = 4
BATCH = 8
ROWS = 24
"""Three steps; each replica has two rows."""
RAGGED = 21
"""In the third step one replica has two rows, and the others have one."""
CLASSES = 5
PLACES = 512
"""Of a sequence: two rows then have as many places as the kernel for products takes."""


def rows(*shape: int, count: int = ROWS) -> np.ndarray:
    """Return rows of float32, every one different."""
    return np.random.default_rng(1).normal(size=(count, *shape)).astype("float32")


def labels(count: int = ROWS) -> np.ndarray:
    return np.random.default_rng(2).integers(0, CLASSES, count).astype("int32")


def sentences(count: int = ROWS, length: int = 7) -> np.ndarray:
    """Return words as numbers from 1 on, with zeros behind sentences that are shorter."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, length + 1, (count, 1))
    return np.where(np.arange(length) < lengths, rng.integers(1, 20, (count, length)), 0).astype("int32")


def crossentropy(**options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def train(
    strategy: un.Strategy,
    stack: Callable[[], list[Any]],
    optimizer: Any,
    x: np.ndarray,
    y: np.ndarray,
    kind: Any = keras.Sequential,
) -> keras.Model:
    """Return a model of a stack of layers after one pass over the rows."""
    with strategy.scope():
        model = kind(stack())
    model.compile(optimizer, crossentropy())
    model.fit(x, y, batch_size=BATCH, verbose=0)
    return model


def dense(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        wide = [layers.Dropout(0.3), layers.Dense(128, "relu"), layers.Dense(64), layers.GlobalAveragePooling1D()]
        return [layers.Input((PLACES, 64)), *wide, layers.Dense(CLASSES)]

    return train(strategy, stack, keras.optimizers.Adam(1e-2), rows(PLACES, 64), labels())


def convolution(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        convolutions = [layers.Conv2D(16, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D(2)]
        more = [layers.Conv2D(12, 3, strides=2), layers.BatchNormalization(), layers.Flatten(), layers.Dense(CLASSES)]
        return [layers.Input((12, 12, 3)), *convolutions, *more]

    return train(strategy, stack, keras.optimizers.Adam(1e-2), rows(12, 12, 3), labels())


def separable(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        convolutions = [layers.DepthwiseConv2D(3, padding="same"), layers.ReLU(), layers.SeparableConv2D(8, 3)]
        return [layers.Input((10, 10, 4)), *convolutions, layers.GlobalAveragePooling2D(), layers.Dense(CLASSES)]

    return train(strategy, stack, keras.optimizers.RMSprop(1e-2), rows(10, 10, 4), labels())


def lstm(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        return [layers.Input((70, 5)), layers.LSTM(12, return_sequences=True), layers.LSTM(8), layers.Dense(CLASSES)]

    return train(strategy, stack, keras.optimizers.Adam(1e-2), rows(70, 5), labels())


def masked_gru(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        return [layers.Input((7,)), layers.Embedding(20, 8, mask_zero=True), layers.GRU(10), layers.Dense(CLASSES)]

    return train(strategy, stack, keras.optimizers.Nadam(1e-2), sentences(), labels())


class Attending(layers.Layer):
    """A block of a transformer."""

    def build(self, shape: Any) -> None:
        self.norm = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, 64, dropout=0.1)
        self.hidden = layers.Dense(shape[-1], "gelu")
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.hidden.build(shape)

    def call(self, x: Any) -> Any:
        normed = self.norm(x)
        return x + self.hidden(self.attention(normed, normed, use_causal_mask=True))


def attention(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        return [layers.Input((PLACES, 64)), Attending(), layers.GlobalAveragePooling1D(), layers.Dense(CLASSES)]

    return train(strategy, stack, keras.optimizers.Adam(1e-2), rows(PLACES, 64), labels())


def ragged_embedding(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        words = layers.Embedding(20, 8, embeddings_regularizer="l2")
        return [layers.Input((7,)), words, layers.Flatten(), layers.Dense(8, "tanh"), layers.Dense(CLASSES)]

    return train(strategy, stack, keras.optimizers.Adagrad(0.1), sentences(RAGGED), labels(RAGGED))


def mixed_precision(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        halves = [layers.Conv2D(8, 3, dtype="mixed_bfloat16"), layers.BatchNormalization(dtype="mixed_bfloat16")]
        dense = layers.Dense(16, "relu", dtype="mixed_bfloat16")
        return [layers.Input((8, 8, 3)), *halves, layers.Flatten(), dense, layers.Dense(CLASSES, dtype="float32")]

    return train(strategy, stack, keras.optimizers.Adam(1e-2), rows(8, 8, 3), labels())


def custom_loop(strategy: un.Strategy) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(16, "silu"), layers.BatchNormalization(), layers.Dense(CLASSES)]
        )
        optimizer = keras.optimizers.Adam(1e-2)
    loss_fn = crossentropy(reduction=None)

    def replica_step(batch: Any) -> Any:
        x, y = batch

        def loss() -> Any:
            return un.compute_average_loss(loss_fn(y, model(x, training=True)))

        value, gradients = un.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    for batch in strategy.distribute_dataset((rows(6), labels()), batch_size=BATCH):
        strategy.run(replica_step, args=(batch,))
    model.optimizer = optimizer
    return model


def clipping(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        return [layers.Input((6,)), layers.Dense(16, "relu", kernel_regularizer="l2"), layers.Dense(CLASSES)]

    schedule = keras.optimizers.schedules.CosineDecay(1e-2, 10)
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=1e-2, global_clipnorm=0.5)
    return train(strategy, stack, optimizer, rows(6), labels())


class OwnStep(keras.Sequential):
    """Adds the size of the scores to the loss, in a step of its own."""

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss(weights: Any) -> Any:
            scores, updated = self.stateless_call(weights, others, x, training=True)
            return self.compute_loss(x, y, scores) + 0.01 * keras.ops.mean(keras.ops.square(scores)), updated

        (value, updated), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"loss": value}, (weights, updated, slots, metrics)


def own_step(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        return [layers.Input((6,)), layers.Dense(16, "elu"), layers.Dense(CLASSES)]

    return train(strategy, stack, keras.optimizers.Adam(1e-2), rows(6), labels(), kind=OwnStep)


def augmentation(strategy: un.Strategy) -> keras.Model:
    def stack() -> list[Any]:
        drawn = [layers.RandomFlip(), layers.RandomTranslation(0.1, 0.1), layers.GaussianNoise(0.1)]
        convolutions = [layers.Conv2D(8, 3, activation="relu"), layers.AveragePooling2D(2), layers.Flatten()]
        return [layers.Input((10, 10, 3)), *drawn, *convolutions, layers.Dense(CLASSES)]

    return train(strategy, stack, keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), rows(10, 10, 3), labels())


TRAININGS: dict[str, Callable[[un.Strategy], keras.Model]] = {
    "dense": dense,
    "convolution": convolution,
    "separable": separable,
    "lstm": lstm,
    "masked gru": masked_gru,
    "attention": attention,
    "ragged embedding": ragged_embedding,
    "mixed bfloat16": mixed_precision,
    "custom loop": custom_loop,
    "clipping": clipping,
    "own train step": own_step,
    "augmentation": augmentation,
}


def train_all(devices: Sequence[int], names: Sequence[str] = tuple(TRAININGS)) -> dict[str, list[str]]:
    """Return the fingerprints of trainings, by name: one for each number of devices."""
    fingerprints: dict[str, list[str]] = {name: [] for name in names}
    for name in names:
        for count in devices:
            strategy = un.MirroredStrategy(devices=count, replicas=REPLICAS)
            keras.utils.set_random_seed(0)
            fingerprints[name].append(un.fingerprint(TRAININGS[name](strategy)))
    return fingerprints


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(train_all(json.loads(sys.argv[1]), *(sys.argv[2:] and [sys.argv[2:]]))))
