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
from keras import layers

import layer_groups
from layer_groups import COUNT, EXACT, FEATURES, OTHERS, SERIES, chain
from processes import HERE
from sizes import cases, mostly_slow
from trainings import assert_equals_keras, assert_same_bits, fitting, labels, on, rows, run

pytestmark = pytest.mark.usefixtures("compiled_for_users")

BATCH = 10  # two batches of ten rows and one of three: five of eight replicas have none
ONE_EACH = 8  # what compiles long: batches of eight rows and one of seven, so that every replica has one row or none
CLASSES = 3
Y = labels(COUNT, CLASSES)

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


COVERING = {"attentions", "noise and batch statistics"}
"""The groups that `make test` tries, on whole batches; `make test-all` tries all, on ragged ones too."""


def groups(of: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in COVERING else pytest.mark.slow) for name in of]


@pytest.mark.parametrize("group", groups(EXACT))
def test_layers_that_look_at_one_row(group):
    """Three ragged steps are those of plain Keras, with the same bits on every placement."""
    x, body = EXACT[group]
    batch = ONE_EACH if group in ("recurrent", "attentions", "convolutional LSTMs") else BATCH
    batch, count = cases((ONE_EACH, 2 * ONE_EACH), (batch, COUNT))
    fit = fitting(x[:count], Y[:count], batch_size=batch)
    assert_equals_keras(classifier(x, body), fit, devices=(1, 3), tolerance=1e-5)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # by Keras' own MixUp
@pytest.mark.parametrize("group", groups(OTHERS))
def test_layers_that_look_at_the_batch_or_draw(group):
    """Three ragged steps have the same bits on every placement."""
    x, body = OTHERS[group]
    batch, count, replicas = cases((ONE_EACH, 2 * ONE_EACH, 8), (BATCH, COUNT, 5))
    assert_same_bits(classifier(x, body), fitting(x[:count], Y[:count], batch_size=batch), replicas=replicas)


def spectral(x: Any) -> Any:
    return layers.SpectralNormalization(layers.Dense(3))(x)


@pytest.mark.slow
def test_spectral_normalization_in_replicas_is_plain_keras():
    """It assigns its layer's kernel in the forward pass, by the weights alone: every replica goes on from the same one."""
    batch, count = cases((ONE_EACH, 2 * ONE_EACH), (BATCH, COUNT))
    assert_equals_keras(classifier(FEATURES, spectral), fitting(FEATURES[:count], Y[:count], batch_size=batch), devices=(1, 3))


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


@pytest.mark.parametrize("kind", mostly_slow(STATEFUL, "LSTM", "Bidirectional"))
def test_stateful_layers_are_refused_in_replicas(kind):
    """compile() refuses them by name, and says why."""
    with pytest.raises(ValueError, match=r"The layer '\w*memory' is stateful: it carries a state for each row .*stateful=False"):
        run(stateful(kind, 1), lambda model: model.compile("sgd", "mse"), on(3))


@pytest.mark.parametrize("kind", STATEFUL)
def test_stateful_layers_are_refused_in_prediction(kind):
    """predict() of a model that was never compiled refuses them too."""
    with pytest.raises(ValueError, match=r"The layer '\w*memory' is stateful"):
        run(stateful(kind, 1), lambda model: model.predict(SERIES[:8], batch_size=8, verbose=0), on(3))


@pytest.mark.parametrize("kind", mostly_slow(STATEFUL, "LSTM"))
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


def jax_layer() -> layers.Layer:
    """A function of JAX with parameters, and a state that it returns."""

    def init(rng, inputs):
        return {"kernel": jax.random.normal(rng, (inputs.shape[-1], 3))}, {"seen": jax.numpy.zeros(3)}

    def call(params, state, inputs, training):
        y = jax.numpy.tanh(inputs @ params["kernel"])
        return y, {"seen": 0.5 * state["seen"] + y.mean(axis=0)} if training else state

    return layers.JaxLayer(call, init, seed=3)


@pytest.mark.compat
def test_a_layer_of_jax():
    """Parameters and state of a JaxLayer are those of plain Keras."""
    pytest.importorskip("tensorflow")  # Keras' JaxLayer asks for it
    assert_equals_keras(classifier(FEATURES, chain(jax_layer)), fitting(FEATURES, Y, batch_size=BATCH))


NOT_TRIED = {
    "no layers": {"InputLayer", "InputSpec", "Wrapper"},
    "for the data pipeline": {
        "ContrastLimitedAdaptiveHistogramEqualization", "Discretization", "Equalization", "HashedCrossing", "Hashing", "IntegerLookup",
        "MaxNumBoundingBoxes", "Pipeline", "StringLookup", "TextVectorization",
    },
    "of other frameworks": {"FlaxLayer", "TFSMLayer", "TorchModuleWrapper"},
    "of Keras 3.16, which is not out": {"Mosaic", "TernaryDense"},
}  # fmt: skip


def test_every_layer_of_keras_is_named_here():
    """A layer that a new Keras brings is tried here before anyone trusts it."""
    files = (__file__, layer_groups.__file__, HERE.parent / "keras" / "private" / "test_compilable_layers.py")
    texts = [pathlib.Path(file).read_text() for file in files]
    named = {getattr(layers, name) for text in texts for name in re.findall(r"layers\.([A-Z]\w+)", text)}
    left = {name for name, kind in vars(layers).items() if isinstance(kind, type) and kind not in named}
    assert sorted(left) == sorted(name for name in set.union(*NOT_TRIED.values()) if hasattr(layers, name))
