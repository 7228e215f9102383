"""The trainings: models of Keras on any backend, with synthetic data of the right shape."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from results import SMALL

CLASSES = 10
WIDTH = 256
HEADS = 4
BLOCKS = 4
TOKENS = 128
VOCABULARY = 8000

RESNET = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""(features within a block, blocks, stride of the first) of each stage of `keras.applications.ResNet50`."""

MOBILENET = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""(how many times as many features within a block, features, blocks, stride of the first) of each stage of `MobileNetV2`."""


class Workload(NamedTuple):
    """One training.

    Args:
        batch: Rows of a global batch.
        steps: Steps of an epoch. Epochs are timed.
        epochs: How many epochs are timed.
        rows: Makes inputs, for a number of rows.
        model: Makes model and optimizer, from the modules of Keras.
        from_logits: Whether the model ends before the softmax.
    """

    batch: int
    steps: int
    epochs: int
    rows: Callable[[np.random.Generator, int], np.ndarray]
    model: Callable[[Any], tuple[Any, Any]]
    from_logits: bool = False

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        count = self.batch * self.steps
        return self.rows(rng, count), rng.integers(0, CLASSES, count).astype("int32")

    def loss(self, keras: Any) -> Any:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=self.from_logits)


def floats(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, count: rng.random((count, *shape), dtype="float32")


def sentences(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return numbers of words, 0 behind the end; between a half and all of the places are words."""
    words = rng.integers(1, VOCABULARY, (count, TOKENS))
    lengths = rng.integers(TOKENS // 2, TOKENS + 1, count)
    return np.where(np.arange(TOKENS) < lengths[:, None], words, 0).astype("int32")


def image(keras: Any, height: int, width: int, features: int) -> Any:
    """Return an input in the format of data that Keras was told to use."""
    return keras.layers.Input((features, height, width) if channels(keras) == 1 else (height, width, features))


def channels(keras: Any) -> int:
    """Return the axis of the channels."""
    return 1 if keras.config.image_data_format() == "channels_first" else -1


def mnist_loop(keras: Any) -> tuple[Any, Any]:
    layers = keras.layers
    convolutions = [
        layer for features in (32, 64) for layer in (layers.Conv2D(features, 3, activation="relu"), layers.MaxPooling2D())
    ]
    top = [layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(CLASSES, "softmax")]
    return keras.Sequential([image(keras, 28, 28, 1), *convolutions, *top]), keras.optimizers.Adam()


def mnist_fit(keras: Any) -> tuple[Any, Any]:
    layers = keras.layers
    first = [layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D()]
    top = [layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(CLASSES)]
    return keras.Sequential([image(keras, 28, 28, 1), *first, *top]), keras.optimizers.Adam()


def cifar(keras: Any, kind: str = "plain") -> tuple[Any, Any]:
    """`strided` has strides in place of pools, `depthwise` and `separable` have such convolutions in place of all but the first."""
    layers = keras.layers
    axis = channels(keras)
    x = inputs = image(keras, 32, 32, 3)
    for features in (64, 128, 256):
        for place in range(3):
            is_last = place == 2 and features < 256
            if kind in ("depthwise", "separable") and (features > 64 or place):
                x = factored(kind, features, keras)(x)
            else:
                x = layers.Conv2D(features, 3, 2 if kind == "strided" and is_last else 1, padding="same")(x)
            x = layers.ReLU()(layers.BatchNormalization(axis=axis)(x))
            x = layers.AveragePooling2D(2)(x) if kind != "strided" and is_last else x
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES, "softmax")(x)), keras.optimizers.SGD(0.1, momentum=0.9)


def factored(kind: str, features: int, keras: Any) -> Callable[[Any], Any]:
    layers = keras.layers
    axis = channels(keras)
    if kind == "separable":
        return layers.SeparableConv2D(features, 3, padding="same")
    depthwise = layers.DepthwiseConv2D(3, padding="same")
    pointwise = layers.Conv2D(features, 1)
    return lambda x: pointwise(layers.ReLU()(layers.BatchNormalization(axis=axis)(depthwise(x))))


def mlp(keras: Any) -> tuple[Any, Any]:
    layers = keras.layers
    hidden = [layers.Flatten(), layers.Dense(128, "sigmoid"), layers.Dense(CLASSES, "softmax")]
    return keras.Sequential([layers.Input((28, 28)), *hidden]), keras.optimizers.Adam(1e-4)


def tiny(keras: Any) -> tuple[Any, Any]:
    """What a step costs beside its operations is nearly all that this net's step takes."""
    layers = keras.layers
    return keras.Sequential([layers.Input((64,)), layers.Dense(32, "relu"), layers.Dense(CLASSES)]), keras.optimizers.Adam()


def transformer(keras: Any) -> tuple[Any, Any]:
    """Padded places are masked in the attention and in the mean over the words."""
    layers = keras.layers
    ops = keras.ops
    words = layers.Input((TOKENS,), dtype="int32")
    is_word = ops.not_equal(words, 0)
    x = placed(keras)(layers.Embedding(VOCABULARY, WIDTH)(words))
    for _ in range(BLOCKS):
        mixed = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x, attention_mask=is_word[:, None, :])
        x = layers.LayerNormalization()(x + mixed)
        wide = layers.Dense(4 * WIDTH, "relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(wide))
    x = layers.GlobalAveragePooling1D()(x, mask=is_word)
    return keras.Model(words, layers.Dense(CLASSES)(x)), keras.optimizers.Adam(1e-4)


def placed(keras: Any) -> Any:
    """Return a layer that adds to each word what is learnt of its place. An Embedding of constant numbers would be no part of the model."""

    class Placed(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.places = self.add_weight(shape=shape[1:], initializer="uniform")

        def call(self, x: Any) -> Any:
            return x + self.places

    return Placed()


def lstm(keras: Any) -> tuple[Any, Any]:
    layers = keras.layers
    return keras.Sequential([layers.Input((64, 64)), layers.LSTM(128), layers.Dense(CLASSES)]), keras.optimizers.Adam()


def gru(keras: Any) -> tuple[Any, Any]:
    """Padded places are masked."""
    layers = keras.layers
    words = layers.Embedding(VOCABULARY, 64, mask_zero=True)
    return keras.Sequential(
        [layers.Input((TOKENS,), dtype="int32"), words, layers.GRU(128), layers.Dense(CLASSES)]
    ), keras.optimizers.Adam()


def application(keras: Any, name: str) -> tuple[Any, Any]:
    """A net of `keras.applications`, on small pictures. At a rate of 0.1, ResNet-50 is dead after some steps."""
    shape = (3, 64, 64) if channels(keras) == 1 else (64, 64, 3)
    model = getattr(keras.applications, name)(weights=None, input_shape=shape, classes=CLASSES)
    return model, keras.optimizers.SGD(0.01, momentum=0.9)


WORKLOADS = {
    "W1 MNIST, two convolutions": Workload(64, 60, 5, floats(28, 28, 1), mnist_loop),
    "W1 MNIST, one convolution": Workload(64, 100, 5, floats(28, 28, 1), mnist_fit, from_logits=True),
    "W2 CIFAR": Workload(128, 2, 3, floats(32, 32, 3), cifar),
    "W3 MLP, batch 32": Workload(32, 1000, 5, floats(28, 28), mlp),
    "W3 MLP, batch 6000": Workload(6000, 20, 5, floats(28, 28), mlp),
    "W4 transformer": Workload(32, 6, 3, sentences, transformer, from_logits=True),
    "W5 LSTM": Workload(64, 60, 5, floats(64, 64), lstm, from_logits=True),
    "W6 ResNet-50": Workload(32, 4, 3, floats(64, 64, 3), partial(application, name="ResNet50")),
    "W7 MobileNetV2": Workload(32, 10, 3, floats(64, 64, 3), partial(application, name="MobileNetV2")),
    "W8 GRU with masks": Workload(64, 20, 5, sentences, gru, from_logits=True),
}
TINY = "MLP 64-32-10, batch 64"
MORE = {
    f"W2 {kind}": Workload(128, 2, 3, floats(32, 32, 3), partial(cifar, kind=kind))
    for kind in ("strided", "depthwise", "separable")
} | {TINY: Workload(64, 200, 5, floats(64), tiny, from_logits=True)}
"""Forms of the CIFAR net, for Keras and Unisono alone, and a net for steps on several devices."""

STEPS = "UNISONO_BENCHMARKS_STEPS"
"""The environment variable that says how many steps an epoch has, where these are not the workload's."""

if SMALL or STEPS in os.environ:
    changes = {"steps": 2, "epochs": 1} if SMALL else {"steps": int(os.environ[STEPS])}
    WORKLOADS, MORE = ({name: workload._replace(**changes) for name, workload in all_.items()} for all_ in (WORKLOADS, MORE))
