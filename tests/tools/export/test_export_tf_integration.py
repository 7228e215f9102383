"""Exports that Keras writes: SavedModel, evaluated through TensorFlow, and ONNX. `make compat` has what they need."""

from __future__ import annotations

import contextlib
import pathlib
import re

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from processes import user_python as python
from trainings import fitting, labels, on, rows
from unisono._src.tools.export import export, load_exported

pytestmark = pytest.mark.compat

X, Y = rows(12, 6), labels(12, 3)
A, B = rows(12, 4), rows(12, 2, seed=1)
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense():
    return keras.Sequential([
        keras.Input((6,)),
        layers.Dense(8, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        layers.Dense(3),
    ])  # fmt: skip


def nested():
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    return keras.Model({"b": b, "a": a}, {"z": layers.Dense(3)(layers.Concatenate()([a, b])), "q": layers.Dense(1)(b)})


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.dense = layers.Embedding(20, 4), layers.Dense(3)

    def call(self, tokens):
        return self.dense(ops.mean(self.embedding(tokens), 1))


def compiled(model):
    model.compile(keras.optimizers.SGD(0.1), crossentropy, metrics=["accuracy"])
    return model


def printed(model):
    return [f"{value:.4f}" for value in model.evaluate(X, Y, batch_size=7, verbose=0)]


@pytest.fixture
def tensorflow():
    return pytest.importorskip("tensorflow")


@pytest.fixture
def saved(tensorflow, tmp_path):
    """(a model, the path of its SavedModel)."""
    model = compiled(dense())
    fitting(X, Y, batch_size=12)(model)
    return model, export(model, tmp_path / "saved", format="saved_model")


def test_a_saved_model_has_the_loss_and_accuracy_of_the_original(saved):
    model, path = saved
    assert printed(compiled(load_exported(path))) == printed(model)
    with on(1, 4).scope():
        ours = load_exported(path)
    assert printed(compiled(ours)) == printed(model)
    np.testing.assert_allclose(ours.predict(X, batch_size=5, verbose=0), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def test_a_saved_model_has_the_same_bits_in_a_scope_and_outside(saved):
    plain = load_exported(saved[1])(X)
    with on(1, 4).scope():
        ours = load_exported(saved[1])(X)
    assert un.fingerprint(plain) == un.fingerprint(ours)


def test_a_saved_model_is_a_layer_before_layers_that_are_trained(saved):
    with on(1, 2).scope():
        body = load_exported(saved[1])
        body.trainable = False
        model = keras.Sequential([keras.Input((6,)), body, layers.Dense(3)])
    assert model.output_shape == (None, 3)
    before = un.fingerprint(model)
    fitting(X, Y, batch_size=12)(compiled(model))
    assert un.fingerprint(model) != before


@pytest.mark.parametrize("strategy", [None, "ours"])
def test_a_saved_model_is_not_trained(saved, strategy):
    with contextlib.nullcontext() if strategy is None else on(1, 2).scope():
        model = compiled(keras.Sequential([load_exported(saved[1])]))
    with pytest.raises(
        ValueError, match=r'has no gradients for JAX: it cannot be trained\. Export the model with format="stablehlo"'
    ):
        model.fit(X, Y, verbose=0)


def test_a_saved_model_is_not_saved_by_keras(saved, tmp_path):
    with pytest.raises(
        NotImplementedError, match=r"is a view of the SavedModel .*saved and is not saved again\. Copy that directory"
    ):
        load_exported(saved[1]).save(tmp_path / "m.keras")


def test_structures_of_a_saved_model(tensorflow, tmp_path):
    model = nested()
    loaded = load_exported(export(model, tmp_path / "m", format="tf_saved_model"))
    theirs, ours = model({"a": A, "b": B}), loaded({"a": A, "b": B})
    keras.tree.assert_same_structure(theirs, ours)
    for a, b in zip(keras.tree.flatten(theirs), keras.tree.flatten(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"takes \{'a': 'a', 'b': 'b'\} and received \(12, 4\)"):
        loaded(A)


def test_a_subclassed_model_as_saved_model(tensorflow, tmp_path):
    tokens, model = labels(12, 20, 5), Subclassed()
    model(tokens)
    loaded = load_exported(export(model, tmp_path / "m", format="saved_model", inputs=tokens[:1]))
    np.testing.assert_allclose(loaded(tokens), model(tokens), rtol=1e-5, atol=1e-6)


def test_a_saved_model_in_the_middle_of_fit_has_the_weights_of_then(tensorflow, tmp_path):
    with on(1, 2).scope():
        model = compiled(dense())
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: export(model, tmp_path / "m", format="saved_model", overwrite=True)
    )
    model.fit(X, Y, verbose=0, callbacks=[callback])
    np.testing.assert_allclose(load_exported(tmp_path / "m")(X), model(X), rtol=1e-5, atol=1e-6)


def test_a_saved_model_of_others_is_refused(tensorflow, tmp_path):
    module = tensorflow.Module()
    module.double = tensorflow.function(lambda x: 2 * x, input_signature=[tensorflow.TensorSpec((None,), "float32")])
    tensorflow.saved_model.save(module, str(tmp_path / "m"), signatures={"double": module.double})
    with pytest.raises(ValueError, match=r"has no endpoint 'serve', only \['double'\]: Keras did not write it by model\.export"):
        load_exported(tmp_path / "m")


def test_a_saved_model_takes_the_place_of_stablehlo(tensorflow, tmp_path):
    model = dense()
    export(model, tmp_path / "m")
    export(model, tmp_path / "m", format="saved_model", overwrite=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m"]
    np.testing.assert_allclose(load_exported(tmp_path / "m")(X), model(X), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jax2onnx
def test_onnx_runs_elsewhere_and_is_not_loaded(tmp_path):
    pytest.importorskip("jax2onnx")
    runtime = pytest.importorskip("onnxruntime")
    with on(1, 2).scope():
        model = compiled(dense())
    fitting(X, Y, batch_size=12)(model)
    path = export(model, tmp_path / "m.onnx", format="onnx")
    session = runtime.InferenceSession(path)
    (outputs,) = session.run(None, {session.get_inputs()[0].name: X})
    np.testing.assert_allclose(outputs, model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"m\.onnx is an ONNX file, which JAX does not run"):
        load_exported(path)
    with pytest.raises(FileExistsError, match="Write overwrite=True"):
        export(model, path, format="onnx")
    export(model, path, format="onnx", overwrite=True)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_tutorial_of_fit_with_a_saved_model(tensorflow, tmp_path):
    """Three loads, three equal evaluations."""
    example = pathlib.Path(__file__).parents[3] / "examples" / "mnist_fit.py"
    finished = python(str(example), "--directory", str(tmp_path), "--format", "saved_model")
    assert finished.returncode == 0, finished.stderr
    names = ("the latest weights", "exported, loaded without a strategy", "exported, loaded with one")
    lines = [re.search(rf"^{name} +loss ([\d.]+)  accuracy ([\d.]+)%$", finished.stdout, re.MULTILINE) for name in names]
    assert None not in lines, finished.stdout
    assert len({line.groups() for line in lines if line}) == 1
    assert (tmp_path / "my_model" / "saved_model.pb").exists()
