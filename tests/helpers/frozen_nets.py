"""Nets most of whose weights are not trained, as fine-tuning has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

import unisono as un

WORDS, LENGTH, WIDTH, CLASSES = 256, 8, 64, 4


def make_attention() -> keras.Model:
    """Attention with adapters of low rank in its embedding, projections and dense layers; the end and the norms are trained."""
    tokens = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    x = x + layers.MultiHeadAttention(4, WIDTH // 4)(normed := layers.LayerNormalization()(x), normed)
    x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x)))
    model = keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
    for layer in model._flatten_layers():
        if isinstance(layer, layers.Embedding | layers.EinsumDense) or (
            isinstance(layer, layers.Dense) and layer.units != CLASSES
        ):
            layer.enable_lora(2)
    return model


def make_convolutions() -> keras.Model:
    """A backbone of convolutions and statistics that is not trained, and an end that is."""
    model = keras.Sequential([layers.Input((8, 8, 16)), layers.Conv2D(32, 3, activation="relu"), layers.BatchNormalization()])
    model.add(layers.Conv2D(64, 3))
    for layer in model.layers:
        layer.trainable = False
    for layer in (layers.GlobalAveragePooling2D(), layers.Dropout(0.2), layers.Dense(CLASSES)):
        model.add(layer)
    return model


def make_quantized() -> keras.Model:
    """Dense layers of whole numbers with adapters."""
    model = keras.Sequential(
        [layers.Input((LENGTH,)), layers.Dense(WIDTH, "relu"), layers.Dense(16 * WIDTH), layers.Dense(CLASSES)]
    )
    model.layers[1].quantize("int8")
    model.layers[1].enable_lora(4)
    return model


def draw_tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, WORDS, (rows, LENGTH))


def draw_images(rows: int) -> np.ndarray:
    return np.random.default_rng(1).random((rows, 8, 8, 16), "float32")


def draw_features(rows: int) -> np.ndarray:
    return np.random.default_rng(1).random((rows, LENGTH), "float32")


@dataclasses.dataclass
class FrozenNet:
    make: Callable[[], keras.Model]
    draw: Callable[[int], np.ndarray]
    cut: int
    """How many of its weights lie cut over two and four devices."""


NETS = {
    "attention": FrozenNet(make_attention, draw_tokens, 7),
    "convolutions": FrozenNet(make_convolutions, draw_images, 2),
    "quantized": FrozenNet(make_quantized, draw_features, 1),
}
"""By name."""


def make_optimizer(name: str) -> Any:
    return {
        "adamw": lambda: keras.optimizers.AdamW(0.01, clipnorm=1.0, use_ema=True, ema_momentum=0.9),
        "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "muon": lambda: keras.optimizers.Muon(0.01),
        "adafactor": lambda: keras.optimizers.Adafactor(0.01),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=1024.0),
    }[name]()


def build(strategy: un.Strategy, net: str, optimizer: str = "adamw") -> keras.Model:
    """Build and compile a net in the scope of a strategy."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = NETS[net].make()
    model.compile(make_optimizer(optimizer), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def draw_labels(rows: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, CLASSES, rows)


def count_cut(model: keras.Model) -> int:
    """Count the weights of which no device has the whole."""
    return sum(not variable.value.sharding.is_fully_replicated for variable in model.weights)
