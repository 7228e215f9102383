"""Layers of Keras in groups, each a function of an input, and the data that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from trainings import labels, rows

COUNT = 23
SERIES, IMAGES, VOLUMES, FEATURES = rows(COUNT, 8, 4), rows(COUNT, 8, 8, 4), rows(COUNT, 4, 4, 4, 2), rows(COUNT, 6)
WORDS = (np.arange(COUNT * 6).reshape(COUNT, 6) % 11 * (np.arange(6) < 2 + np.arange(COUNT)[:, None] % 5)).astype("int32")


def chain(*stack: Any) -> Callable[[Any], Any]:
    """Layers one after another."""

    def body(x: Any) -> Any:
        for layer in stack:
            x = layer()(x)
        return x

    return body


def one_dimension(x: Any) -> Any:
    x = layers.Conv1D(4, 3, padding="causal", dilation_rate=2, activation="tanh")(layers.ZeroPadding1D(1)(x))
    x = layers.SeparableConv1D(4, 3, depth_multiplier=2, padding="same")(x)
    x = layers.Conv1D(4, 3, groups=2)(layers.DepthwiseConv1D(3, padding="same")(x))
    x = layers.Conv1DTranspose(4, 3, strides=2, padding="same")(layers.Cropping1D(1)(x))
    x = layers.MaxPooling1D(3, 2, padding="same")(layers.UpSampling1D(2)(x))
    x = layers.AveragePooling1D(3, 2, padding="same")(x)
    many = [layers.AdaptiveAveragePooling1D(2)(x), layers.AdaptiveMaxPooling1D(3)(x)]
    flat = [layers.GlobalAveragePooling1D()(x), layers.GlobalMaxPooling1D()(x), *(layers.Flatten()(y) for y in many)]
    return layers.Concatenate()(flat)


def two_dimensions(x: Any) -> Any:
    x = layers.Conv2D(4, 3, dilation_rate=2, padding="same", activation="tanh")(layers.ZeroPadding2D(1)(x))
    x = layers.SeparableConv2D(4, 3, padding="same")(x)
    x = layers.Conv2D(4, 3, strides=2, groups=2)(layers.DepthwiseConv2D(3, depth_multiplier=1, padding="same")(x))
    x = layers.Conv2DTranspose(4, 3, strides=2)(x)
    x = layers.MaxPooling2D(3, 2, padding="same")(layers.UpSampling2D(2, interpolation="bilinear")(layers.Cropping2D(1)(x)))
    x = layers.AveragePooling2D(3, 2, padding="same")(x)
    many = [layers.AdaptiveAveragePooling2D(2)(x), layers.AdaptiveMaxPooling2D(2)(x)]
    flat = [layers.GlobalAveragePooling2D()(x), layers.GlobalMaxPooling2D()(x), *(layers.Flatten()(y) for y in many)]
    return layers.Concatenate()(flat)


def three_dimensions(x: Any) -> Any:
    x = layers.Conv3D(2, 3, strides=2, activation="tanh")(layers.ZeroPadding3D(1)(x))
    x = layers.UpSampling3D(2)(layers.Cropping3D(((0, 0), (0, 0), (0, 1)))(layers.Conv3DTranspose(2, 2, strides=2)(x)))
    x = layers.AveragePooling3D(2, 1)(layers.MaxPooling3D(3, 2, padding="same")(x))
    many = [layers.AdaptiveAveragePooling3D(2)(x), layers.AdaptiveMaxPooling3D(1)(x)]
    flat = [layers.GlobalAveragePooling3D()(x), layers.GlobalMaxPooling3D()(x), *(layers.Flatten()(y) for y in many)]
    return layers.Concatenate()(flat)


def normalizations(x: Any) -> Any:
    x = layers.GroupNormalization(2)(layers.Conv2D(4, 3)(x))
    x = layers.RMSNormalization()(layers.PReLU(shared_axes=[1, 2])(x))
    return layers.UnitNormalization()(layers.LayerNormalization()(layers.Dense(5)(layers.Flatten()(x))))


def attentions(x: Any) -> Any:
    embedding = layers.ReversibleEmbedding(11, 6)
    x = layers.Add()([embedding(x), layers.Embedding(11, 6, mask_zero=True)(x)])
    x = layers.Add()([x, layers.GroupQueryAttention(3, 4, 2)(x, x, use_causal_mask=True)])
    x = layers.Average()([layers.Attention(use_scale=True)([x, x]), layers.AdditiveAttention()([x, x])])
    x = layers.EinsumDense("abc,cd->abd", (None, 6), bias_axes="d")(x)
    return layers.Reshape((6 * 11,))(embedding(layers.MultiHeadAttention(2, 3)(x, x), reverse=True))


def recurrent(x: Any) -> Any:
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(layers.Masking()(x))
    x = layers.Bidirectional(layers.GRU(2, return_sequences=True), merge_mode="sum")(x)
    x = layers.RNN(layers.StackedRNNCells([layers.LSTMCell(2), layers.GRUCell(3), layers.SimpleRNNCell(2)]))(x)
    return layers.SimpleRNN(2)(layers.TimeDistributed(layers.Dense(2, "tanh"))(layers.RepeatVector(3)(x)))


def convolutional_lstms(x: Any) -> Any:
    lines = layers.ConvLSTM1D(2, 2)(x)
    squares = layers.ConvLSTM2D(2, 2)(layers.Reshape((4, 2, 4, 2))(x))
    cubes = layers.ConvLSTM3D(1, 2)(layers.Reshape((2, 2, 4, 2, 2))(x))
    return layers.Concatenate()([layers.Flatten()(y) for y in (lines, squares, cubes)])


def merges_and_activations(x: Any) -> Any:
    a, b = layers.Dense(4, "elu")(x), layers.ELU()(layers.Dense(4)(x))
    a, b = layers.LeakyReLU()(layers.Maximum()([a, b])), layers.Activation("gelu")(layers.Minimum()([a, b]))
    c = layers.Softmax()(layers.Subtract()([layers.Multiply()([a, b]), layers.ReLU(max_value=1.0)(a)]))
    c = layers.Lambda(lambda x: 2 * x)(layers.ActivityRegularization(0.01, 0.01)(layers.Identity()(c)))
    return layers.Concatenate()([c, layers.Dot(1)([a, b])])


NORMALIZATION = rows(50, 8, 8, 4, seed=3) * 3 + 1


def preprocessing(x: Any) -> Any:
    normalization = layers.Normalization()
    normalization.adapt(NORMALIZATION)
    x = layers.Resizing(6, 6)(layers.CenterCrop(7, 7)(layers.Rescaling(0.5, 0.1)(normalization(x))))
    return layers.Permute((3, 1, 2))(layers.Conv2D(2, 3)(x))


def spectrograms(x: Any) -> Any:
    x = layers.Reshape((64,))(x)
    stft = layers.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16)(x[..., None])
    mel = layers.MelSpectrogram(fft_length=16, sequence_stride=8, sampling_rate=1000, num_mel_bins=4, max_freq=400)(x)
    return layers.Concatenate()([layers.Flatten()(stft), layers.Rescaling(0.02)(layers.Flatten()(mel))])  # mel: decibels


def categories(x: Any) -> Any:
    return layers.CategoryEncoding(11, "multi_hot")(x)


EXACT: dict[str, tuple[np.ndarray, Callable[[Any], Any]]] = {
    "one dimension": (SERIES, one_dimension),
    "two dimensions": (IMAGES, two_dimensions),
    "three dimensions": (VOLUMES, three_dimensions),
    "normalizations": (IMAGES, normalizations),
    "attentions": (WORDS, attentions),
    "recurrent": (SERIES, recurrent),
    "convolutional LSTMs": (VOLUMES[..., 0], convolutional_lstms),
    "merges and activations": (FEATURES, merges_and_activations),
    "preprocessing": (IMAGES, preprocessing),
    "spectrograms": (VOLUMES[..., 0], spectrograms),
    "categories": (WORDS, categories),
}


def noise(x: Any) -> Any:
    x = layers.BatchNormalization()(layers.GaussianDropout(0.2)(layers.GaussianNoise(0.1)(x)))
    x = layers.SpatialDropout2D(0.3)(layers.AlphaDropout(0.2)(layers.Dropout(0.1)(x)))
    return layers.SpatialDropout1D(0.2)(layers.Reshape((8, 8 * 4))(layers.SpatialDropout3D(0.2)(x[:, None])))


def colours(x: Any) -> Any:
    x = chain(layers.RandomFlip, layers.RandomGrayscale)(ops.sigmoid(x[..., :3]))
    kinds = [layers.RandomBrightness, layers.RandomContrast, layers.RandomHue, layers.RandomSaturation]
    kinds += [layers.RandomSharpness, layers.RandomColorDegeneration]
    for kind in kinds:
        x = kind(0.2, value_range=(0, 1))(x)
    x = layers.RandomColorJitter((0, 1), 0.1)(layers.RandomPosterization(4, value_range=(0, 1))(x))
    return layers.RandomInvert(value_range=(0, 1))(layers.Solarization(value_range=(0, 1))(x))


def patches(x: Any) -> Any:
    x = layers.AutoContrast(value_range=(0, 1))(ops.sigmoid(x[..., :3]))
    x = layers.CutMix()(layers.MixUp()(x))
    return layers.RandomGaussianBlur()(layers.RandomErasing(value_range=(0, 1))(x))


def places(x: Any) -> Any:
    """Keras compiles none of these, and says so of each (`supports_jit`)."""
    x = layers.RandomRotation(0.1)(layers.RandomCrop(6, 7)(x))
    return layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, activation="tanh")(x))


def more_places(x: Any) -> Any:
    x = layers.RandomShear(0.1, 0.1)(layers.RandomZoom(0.1)(layers.RandomTranslation(0.1, 0.1)(ops.sigmoid(x[..., :3]))))
    return layers.AugMix((0, 1), num_chains=1, chain_depth=1)(layers.RandomPerspective()(x))


OTHERS: dict[str, tuple[np.ndarray, Callable[[Any], Any]]] = {
    "noise and batch statistics": (IMAGES, noise),
    "random colours": (IMAGES, colours),
    "random patches": (IMAGES, patches),
    "random places": (IMAGES, places),
    "more random places": (IMAGES, more_places),
}
"""Layers that look at their replica's rows, or draw random numbers for them."""


def make_family(name: str) -> tuple[keras.Model, dict[str, Any], dict[str, Any]]:
    """Return a model of a group of layers, what to compile it with, and data."""
    x, body = (EXACT | OTHERS)[name]
    inputs = keras.Input(x.shape[1:], dtype=x.dtype)
    model = keras.Model(inputs, layers.Dense(3, dtype="float32")(layers.Flatten()(body(inputs))))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, {"optimizer": "adam", "loss": loss, "metrics": ["accuracy"]}, {"x": x, "y": labels(COUNT, 3)}
