"""Small models of every layer family, each with an optimizer, a loss and data that try another part of the engine.

All have distinct values in every row, a ragged last batch, and at least twenty steps in two epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

ROWS = 123
BATCH = 12  # 11 batches an epoch, the last of 3 rows: fewer than most R


class Extra(layers.Layer):
    """Adds a loss of its own: a mean over rows."""

    supports_masking = True

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
        return x


def conv() -> tuple[keras.Model, dict[str, Any], dict[str, Any]]:
    x = inputs = layers.Input((12, 12, 3))
    x = layers.MaxPooling2D(2)(layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(x))))
    x = layers.AveragePooling2D(2)(layers.Conv2D(8, 3, padding="same", activation="relu")(x))
    x = layers.Dropout(0.3)(layers.Dense(32, activation="relu")(layers.Dropout(0.2)(layers.Flatten()(x))))
    model = keras.Model(inputs, layers.Dense(10)(x))
    rng = np.random.default_rng(1)
    data = {"x": rng.standard_normal((ROWS, 12, 12, 3)).astype("float32"), "y": rng.integers(0, 10, ROWS)}
    compile_ = {"optimizer": "adam", "loss": crossentropy(), "metrics": ["accuracy"]}
    return model, compile_, {**data, "class_weight": {0: 0.5, 3: 2.0}}


def normalized() -> tuple[keras.Model, dict[str, Any], dict[str, Any]]:
    """Small: what has to be quick takes it in place of `conv`."""
    hidden = [layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3)]
    model = keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(10)])
    rng = np.random.default_rng(6)
    data = {"x": rng.standard_normal((ROWS, 6)).astype("float32"), "y": rng.integers(0, 10, ROWS)}
    return (
        model,
        {"optimizer": "adam", "loss": crossentropy(), "metrics": ["accuracy"]},
        {**data, "class_weight": {0: 0.5, 3: 2.0}},
    )


def attention() -> tuple[keras.Model, dict[str, Any], dict[str, Any]]:
    x = inputs = layers.Input((10,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(x)
    h = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 8, dropout=0.1)(h, h)])
    x = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
    model = keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))
    rng = np.random.default_rng(2)
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, 30)
    compile_ = {
        "optimizer": keras.optimizers.AdamW(schedule, weight_decay=1e-2, global_clipnorm=0.5),
        "loss": crossentropy(),
        "weighted_metrics": ["accuracy"],
    }
    return model, compile_, {
        "x": padded(rng, 30), "y": rng.integers(0, 5, ROWS), "sample_weight": rng.uniform(0.1, 3, ROWS).astype("float32"),
    }  # fmt: skip


def lstm() -> tuple[keras.Model, dict[str, Any], dict[str, Any]]:
    x = inputs = layers.Input((10,), dtype="int32")
    x = layers.LSTM(12, return_sequences=True)(layers.Embedding(30, 8, mask_zero=True)(x))
    model = keras.Model(inputs, layers.Dense(7)(x))
    rng = np.random.default_rng(3)
    compile_ = {"optimizer": "rmsprop", "loss": crossentropy(reduction="mean_with_sample_weight"), "metrics": ["accuracy"]}
    weights = rng.uniform(0.1, 3, (ROWS, 10)).astype("float32")
    return model, compile_, {"x": padded(rng, 30), "y": rng.integers(0, 7, (ROWS, 10)), "sample_weight": weights}


def gru() -> tuple[keras.Model, dict[str, Any], dict[str, Any]]:
    x = inputs = layers.Input((8, 6))
    x = layers.GRU(12, dropout=0.2)(layers.GaussianNoise(0.1)(layers.Masking()(x)))
    model = keras.Model(inputs, layers.Dense(3)(x))
    rng = np.random.default_rng(4)
    x_data = rng.standard_normal((ROWS, 8, 6)).astype("float32")
    x_data[::3, 5:] = 0
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.9, clipnorm=1.0)
    compile_ = {"optimizer": optimizer, "loss": "mse", "metrics": ["mae", keras.metrics.RootMeanSquaredError()]}
    return model, compile_, {"x": x_data, "y": rng.standard_normal((ROWS, 3)).astype("float32")}


def several_outputs() -> tuple[keras.Model, dict[str, Any], dict[str, Any]]:
    left, right = layers.Input((6,), name="left"), layers.Input((4,), name="right")
    x = layers.Concatenate()(
        [layers.Dense(8, "tanh", kernel_regularizer="l2")(left), layers.Dense(8, activity_regularizer="l2")(right)]
    )
    x = Extra()(x)
    model = keras.Model({"left": left, "right": right}, {"a": layers.Dense(3, name="a")(x), "b": layers.Dense(1, name="b")(x)})
    rng = np.random.default_rng(5)
    x_data = {"left": rng.standard_normal((ROWS, 6)).astype("float32"), "right": rng.standard_normal((ROWS, 4)).astype("float32")}
    y = {"a": rng.integers(0, 3, ROWS), "b": rng.standard_normal((ROWS, 1)).astype("float32")}
    compile_ = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        "loss": {"a": crossentropy(), "b": "huber"},
        "loss_weights": {"a": 0.7, "b": 0.3},
        "metrics": {"a": ["accuracy"], "b": ["mae"]},
    }
    return model, compile_, {"x": x_data, "y": y}


FAMILIES: dict[str, Callable[[], tuple[keras.Model, dict[str, Any], dict[str, Any]]]] = {
    "conv": conv, "attention": attention, "lstm": lstm, "gru": gru, "several_outputs": several_outputs,
    "normalized": normalized,
}  # fmt: skip


def crossentropy(**kwargs: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def padded(rng: np.random.Generator, vocabulary: int, length: int = 10) -> np.ndarray:
    """Sentences of different lengths, zeros behind them."""
    lengths = rng.integers(1, length + 1, ROWS)
    return (rng.integers(1, vocabulary, (ROWS, length)) * (np.arange(length) < lengths[:, None])).astype("int32")
