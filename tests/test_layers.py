"""Everything else that Keras models are made of: the same bits on one device and on three, and plain Keras' training where no
layer looks at the batch or draws random numbers."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

from trainings import assert_equals_keras, assert_same_bits, distance, fitting, labels, on, rows, run

COUNT, BATCH = 23, 10  # two batches of ten rows and one of three: five of eight replicas have none
ONE_EACH = 8  # what compiles long: batches of eight rows and one of seven, so that every replica has one row or none
CLASSES = 3
Y = labels(COUNT, CLASSES)
SERIES, IMAGES, VOLUMES, FEATURES = rows(COUNT, 8, 4), rows(COUNT, 8, 8, 4), rows(COUNT, 4, 4, 4, 2), rows(COUNT, 6)
WORDS = (np.arange(COUNT * 6).reshape(COUNT, 6) % 11 * (np.arange(6) < 2 + np.arange(COUNT)[:, None] % 5)).astype("int32")

Make = Callable[[], keras.Model]


def classifier(x: np.ndarray, body: Callable[[Any], Any]) -> Make:
    """A function that makes a model of `body`, a function of the inputs, with a classifier behind it."""

    def make() -> keras.Model:
        inputs = keras.Input(x.shape[1:], dtype=x.dtype)
        features = layers.Flatten()(body(inputs))
        model = keras.Model(inputs, layers.Dense(CLASSES)(features))
        model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return make


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


OTHERS: dict[str, tuple[np.ndarray, Callable[[Any], Any]]] = {
    "noise and batch statistics": (IMAGES, noise),
    "random colours": (IMAGES, colours),
    "random patches": (IMAGES, patches),
}
"""Layers that look at their replica's rows, or draw random numbers for them."""


COVERING = {"two dimensions", "attentions", "recurrent", "normalizations", "noise and batch statistics"}
"""The groups that CI runs; `make matrix` runs all."""


def groups(of: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in COVERING else pytest.mark.full) for name in of]


@pytest.mark.parametrize("group", groups(EXACT))
def test_layers_that_look_at_one_row(group):
    """Three ragged steps are those of plain Keras, with the same bits on every placement."""
    x, body = EXACT[group]
    batch = ONE_EACH if group in ("recurrent", "attentions", "convolutional LSTMs") else BATCH
    assert_equals_keras(classifier(x, body), fitting(x, Y, batch_size=batch), tolerance=1e-5)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # by Keras' own MixUp
@pytest.mark.filterwarnings("ignore:A program cannot be loaded")  # MixUp and CutMix sort, and XLA cannot write that down
@pytest.mark.parametrize("group", groups(OTHERS))
def test_layers_that_look_at_the_batch_or_draw(group):
    """Three ragged steps have the same bits on every placement."""
    x, body = OTHERS[group]
    assert_same_bits(classifier(x, body), fitting(x, Y, batch_size=BATCH), replicas=5)


def test_one_replica_of_noise_is_plain_keras():
    """Every kind of noise at once: it draws what plain Keras draws."""
    fit = fitting(IMAGES, Y, batch_size=BATCH)
    assert_equals_keras(classifier(IMAGES, noise), fit, replicas=(1,), tolerance=1e-5)


def spectral(x: Any) -> Any:
    return layers.SpectralNormalization(layers.Dense(3))(x)


def test_one_replica_of_spectral_normalization_is_plain_keras():
    """The vector of its power iteration moves on, as in plain Keras."""
    fit = fitting(FEATURES, Y, batch_size=BATCH)
    plain = assert_equals_keras(classifier(FEATURES, spectral), fit, replicas=(1,)).model
    fresh = run(classifier(FEATURES, spectral), lambda model: model).model
    assert distance(plain, fresh) > 0.01


def test_spectral_normalization_in_replicas_is_refused():
    """It assigns its layer's kernel in the forward pass: refused by the kernel's path."""
    with pytest.raises(ValueError, match=r"assigns 'spectral_normalization\w*/dense\w*/kernel', a trainable variable"):
        run(classifier(FEATURES, spectral), fitting(FEATURES, Y, batch_size=BATCH), on(3))


STATEFUL = {
    "LSTM": lambda: layers.LSTM(2, stateful=True, name="memory"),
    "RNN": lambda: layers.RNN(layers.GRUCell(2), stateful=True, name="memory"),
    "Bidirectional": lambda: layers.Bidirectional(layers.LSTM(2, stateful=True, name="memory")),
    "ConvLSTM1D": lambda: chain(lambda: layers.Reshape((8, 2, 2)), lambda: layers.ConvLSTM1D(1, 1, stateful=True, name="memory")),
}


def stateful(kind: str, rows_of_input: int) -> Make:
    """A model that is not compiled, and whose input fixes how many rows a batch has."""

    def make() -> keras.Model:
        inputs = keras.Input((8, 4), batch_size=rows_of_input)
        return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(STATEFUL[kind]()(inputs))))

    return make


@pytest.mark.parametrize("kind", STATEFUL)
def test_stateful_layers_are_refused_in_replicas(kind):
    """compile() refuses them by name, and says why."""
    with pytest.raises(ValueError, match=r"The layer '\w*memory' is stateful: it carries a state for each row .*stateful=False"):
        run(stateful(kind, 1), lambda model: model.compile("sgd", "mse"), on(3))


@pytest.mark.parametrize("kind", STATEFUL)
def test_stateful_layers_are_refused_in_prediction(kind):
    """predict() of a model that was never compiled refuses them too."""
    with pytest.raises(ValueError, match=r"The layer '\w*memory' is stateful"):
        run(stateful(kind, 1), lambda model: model.predict(SERIES[:8], batch_size=8, verbose=0), on(3))


@pytest.mark.parametrize("kind", STATEFUL)
def test_one_replica_of_a_stateful_layer_is_plain_keras(kind):
    """fit, and three calls of predict. (Keras on JAX does not carry the state from batch to batch, in any of them.)"""
    outputs = []

    def make():
        model = stateful(kind, 4)()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def fit(model):
        history = fitting(SERIES[:12], rows(12, 1), batch_size=4)(model)
        outputs.append([model.predict(SERIES[:4], batch_size=4, verbose=0) for _ in range(3)])
        return history

    assert_equals_keras(make, fit, replicas=(1,))
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5)


class Keeping(layers.Layer):
    """A user's layer with state of three kinds: a moving mean, a count of calls, and random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.random = keras.random.SeedGenerator(7)

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
            self.calls.assign_add(1)
            x = x + keras.random.normal(ops.shape(x), stddev=0.1, seed=self.random)
        return x - self.mean


def test_a_layer_with_state_of_its_own():
    """The mean is that of all rows, the calls are steps, and replicas draw numbers of their own."""
    found = []

    def fit(model):
        fitting(FEATURES, Y, batch_size=BATCH)(model)
        found.append(model.layers[1])

    assert_same_bits(classifier(FEATURES, chain(Keeping)), fit)
    run(classifier(FEATURES, chain(Keeping)), fit)
    for layer in found:
        assert int(layer.calls.value) == 3
        np.testing.assert_allclose(layer.mean.value, found[-1].mean.value, rtol=1e-5, atol=1e-7)
        assert np.array_equal(layer.random.state.value, found[-1].random.state.value)


def jax_layer() -> layers.Layer:
    """A function of JAX with parameters, and a state that it returns."""

    def init(rng, inputs):
        return {"kernel": jax.random.normal(rng, (inputs.shape[-1], 3))}, {"seen": jax.numpy.zeros(3)}

    def call(params, state, inputs, training):
        y = jax.numpy.tanh(inputs @ params["kernel"])
        return y, {"seen": 0.5 * state["seen"] + y.mean(axis=0)} if training else state

    return layers.JaxLayer(call, init, seed=3)


def test_a_layer_of_jax():
    """Parameters and state of a JaxLayer are those of plain Keras."""
    pytest.importorskip("tensorflow")  # Keras' JaxLayer asks for it
    assert_equals_keras(classifier(FEATURES, chain(jax_layer)), fitting(FEATURES, Y, batch_size=BATCH))


NOT_COMPILED = {
    "AugMix": lambda: layers.AugMix((0, 1)),
    "RandAugment": lambda: layers.RandAugment((0, 1)),
    "RandomCrop": lambda: layers.RandomCrop(4, 4),
    "RandomPerspective": layers.RandomPerspective,
    "RandomRotation": lambda: layers.RandomRotation(0.1),
    "RandomShear": lambda: layers.RandomShear(0.1),
    "RandomTranslation": lambda: layers.RandomTranslation(0.1, 0.1),
    "RandomZoom": lambda: layers.RandomZoom(0.1),
}


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_layers_that_keras_cannot_compile_on_jax_are_refused(name):
    """compile() names the layer, and the data pipeline as the place for it."""
    with pytest.raises(ValueError, match=r"the layers \['random_\w+'.*do not support compilation. Move layers .* data pipeline"):
        run(classifier(IMAGES, chain(NOT_COMPILED[name])), lambda model: model, on(3))


NOT_TRIED = {
    "no layers": {"InputLayer", "InputSpec", "Wrapper"},
    "for the data pipeline": {
        "ContrastLimitedAdaptiveHistogramEqualization", "Discretization", "Equalization", "HashedCrossing", "Hashing", "IntegerLookup",
        "MaxNumBoundingBoxes", "Pipeline", "StringLookup", "TextVectorization",
    },
    "of other frameworks": {"FlaxLayer", "TFSMLayer", "TorchModuleWrapper"},
    "not to be compiled on JAX, without saying so": {"RandomElasticTransform"},
}  # fmt: skip


def test_every_layer_of_keras_is_named_here():
    """A layer that a new Keras brings is tried here before anyone trusts it."""
    named = {getattr(layers, name) for name in re.findall(r"layers\.([A-Z]\w+)", pathlib.Path(__file__).read_text())}
    left = {name for name, kind in vars(layers).items() if isinstance(kind, type) and kind not in named}
    assert sorted(left) == sorted(set.union(*NOT_TRIED.values()))
