"""Files of exports: damaged, moved and replaced ones, and what no file can hold, in words that say what to write."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from trainings import rows
from unisono._src.keras.checkpoint.files import DamagedError
from unisono._src.keras.private import export_inputs as seam
from unisono._src.tools.export import export, load_exported, write_place
from unisono._src.tools.export.forward_program import ExportError

X = rows(12, 6)


def small(**options):
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, **options)])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    @classmethod
    def built(cls):
        model = cls()
        model(X)
        return model


class Counting(layers.Layer):
    """A Python `if` on the number of rows."""

    def call(self, x):
        return x if x.shape[0] > 5 else 2 * x

    def compute_output_shape(self, shape):  # without it, Keras does not build it either
        return shape


# Files.


def test_a_damaged_export_is_found_and_named(tmp_path):
    path = Path(export(small(), tmp_path / "m"))
    files = sorted((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    for file in (files[-1], path / "stablehlo_1" / "record.json"):
        good = file.read_bytes()
        middle = len(good) // 2
        file.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        with pytest.raises(DamagedError, match=rf"The export {path} is damaged: .*Export the model again, or take another copy"):
            load_exported(path)
        file.write_bytes(good)
    load_exported(path)


def test_an_export_can_be_moved(tmp_path):
    path = export(small(), tmp_path / "m")
    expected = np.asarray(load_exported(path)(X))
    shutil.move(path, tmp_path / "elsewhere")
    np.testing.assert_array_equal(load_exported(tmp_path / "elsewhere")(X), expected)


def test_what_is_there_is_replaced_only_if_one_says_so(tmp_path):
    path = export(small(), tmp_path / "m")
    with pytest.raises(FileExistsError, match=r"m exists\. Write overwrite=True to replace the export there, or another path"):
        export(small(), path)
    other = small()
    export(other, path, overwrite=True)
    assert un.fingerprint(load_exported(path).get_weights()) == un.fingerprint(other.get_weights())
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match=r"mine exists and is no export: overwrite=True replaces exports alone"):
        export(other, tmp_path / "mine", overwrite=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m", "mine"]


def test_a_failed_export_leaves_what_was_there(tmp_path):
    path = export(small(), tmp_path / "m")
    model = keras.Sequential([keras.Input((6,)), Counting()])
    with pytest.raises(ExportError):
        export(model, path, overwrite=True)
    load_exported(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_what_came_there_meanwhile_is_not_replaced(tmp_path):
    def write(to):
        to.mkdir()
        (tmp_path / "m").write_text("mine")

    with pytest.raises(FileExistsError, match="m exists"):
        write_place.write_atomically(tmp_path / "m", False, write)
    assert (tmp_path / "m").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("nothing", FileNotFoundError, r"There is no export at .*/nothing\."),
        ("m.keras", ValueError, r"m\.keras is no export: .* Write keras\.models\.load_model\('.*m\.keras'\)\."),
        ("m.onnx", ValueError, r"m\.onnx is an ONNX file, which JAX does not run\. Run it by onnxruntime\.InferenceSession"),
        ("m.txt", ValueError, r"m\.txt is no export: .* Write what un\.export was given\."),
    ],
)
def test_what_is_no_export_is_named(tmp_path, name, error, said):
    if name != "nothing":
        (tmp_path / name).write_text("")
    with pytest.raises(error, match=said):
        load_exported(tmp_path / name)


# What is refused.


class Recovering(layers.Layer):
    """Goes on without a layer that fails."""

    def __init__(self):
        super().__init__(name="recovering")
        self.first, self.second = Counting(name="first"), Counting(name="second")

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        with contextlib.suppress(Exception):
            return self.first(x)
        return self.second(x)

    def compute_output_shape(self, shape):
        return shape


class Even(layers.Layer):
    """One that JAX answers with no."""

    def call(self, x):
        return x if x.shape[0] % 2 == 0 else 2 * x


class Single(layers.Layer):
    def call(self, x):
        return x[0] if x.shape[0] == 1 else x


class Printing(layers.Layer):
    def call(self, x):
        jax.debug.print("{}", x)
        return x


class Untracked(layers.Layer):
    def call(self, x):
        return x * OUTSIDE[0]


class Tuples(layers.Layer):
    def call(self, x):
        return {1: x}


OUTSIDE = []


@pytest.mark.parametrize(
    ("layer", "error", "text"),
    [
        (lambda: Counting(name="counting"), ExportError,
         r"The layer 'counting' \(Counting\) keeps the model '\w+' from being exported: its call\(\) fails in inference where the number of rows "
         r"is left open\. Write it with keras\.ops and .*, or leave the layer out of what is exported\. It says: Symbolic dimension comparison"),
        (Recovering, ExportError, r"The layer 'second' \(Counting\) keeps the model"),
        (Even, ExportError, r"does one thing for 101 rows and another for 106, or for 1: a Python if on the number of rows, of which a file would"),
        (Single, ExportError, r"does one thing for 101 rows and another for 106, or for 1"),
        (Printing, ExportError, r"cannot be exported to StableHLO for cpu, cuda, tpu: .* What runs in Python \(callbacks, jax\.debug\.print\)"),
        (Untracked, ExportError, r"reads 'outside', a variable that the model does not track: in the file it would be a constant"),
        (Tuples, TypeError, r"An export keeps dicts with texts as keys, and received the key 1 of type int"),
    ],
)  # fmt: skip
def test_models_that_no_file_can_hold(tmp_path, layer, error, text):
    OUTSIDE[:] = [keras.Variable(2.0, name="outside")]
    model = keras.Sequential([layer()])
    model(X)
    with pytest.raises(error, match=text):
        export(model, tmp_path / "m", inputs=X)
    assert not list(tmp_path.iterdir())


def test_a_length_that_cannot_be_left_open_is_fixed_by_an_example(tmp_path):
    class Pairs(layers.Layer):
        def call(self, x):
            return x[:, ::2] if x.shape[1] > 3 else x

        def compute_output_shape(self, shape):
            return shape

    inputs = keras.Input((None,))
    model = keras.Model(inputs, Pairs()(inputs))
    with pytest.raises(
        ExportError, match=r"If it is another length that is left open, write un\.export\(model, path, inputs=x\[:1\]\)"
    ):
        export(model, tmp_path / "m")
    assert np.array_equal(load_exported(export(model, tmp_path / "m", inputs=X[:1]))(X), X[:, ::2])


NOT_EXPORTED = {
    "another format": (
        small, {"format": "h5"}, ValueError, r"format='h5'\. Write one of 'stablehlo', 'saved_model', 'onnx'",
    ),
    "a folder for ONNX": (small, {"format": "onnx"}, ValueError, r"for an ONNX file\. Write '.*m\.onnx'"),
    "a layer": (
        lambda: layers.Dense(1), {}, TypeError,
        r"of type Dense\. It exports a keras\.Model; write keras\.Sequential\(\[layer\]\) for a layer",
    ),
    "no weights": (
        lambda: keras.Sequential([layers.Dense(1)]), {}, ValueError,
        r"is not built, so that it has no weights yet\. Call it on one batch, or make it with keras\.Input",
    ),
    "no example": (
        Subclassed.built, {}, ValueError, r"is a subclassed one \(Subclassed\), .* Write un\.export\(model, path, inputs=x\[:1\]\)",
    ),
    "a number as an example": (
        Subclassed.built, {"inputs": 3}, TypeError, r"inputs= received 3 of type int\. Give arrays whose first axis counts rows",
    ),
    "texts": (
        Subclassed.built, {"inputs": np.array([["a"]])}, TypeError,
        r"takes texts \(<U1\), which JAX knows no arrays of\. Move the layers that read texts into the data",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_EXPORTED)
def test_what_cannot_be_exported_is_named(tmp_path, what):
    make, options, error, said = NOT_EXPORTED[what]
    with pytest.raises(error, match=said):
        export(make(), tmp_path / "m", **options)
    assert not list(tmp_path.iterdir())


def test_layers_choose_no_kernels_of_this_machine(monkeypatch):
    monkeypatch.setattr(seam.rnn, "_is_gpu_available", lambda: True)
    with seam.avoid_platform_kernels():
        assert (seam.rnn._is_gpu_available(), keras.config.is_flash_attention_enabled()) == (False, False)
    assert (seam.rnn._is_gpu_available(), keras.config.is_flash_attention_enabled()) == (True, None)


@pytest.mark.parametrize(
    ("format", "path", "text"),
    [
        ("saved_model", "m", r"A SavedModel needs tensorflow, which is not installed\. Write: pip install \"unisono\[tf\]\""),
        ("tf_saved_model", "m", r"A SavedModel needs tensorflow"),
        ("onnx", "m.onnx", r'format="onnx" needs jax2onnx, which is not installed\. Write: pip install "unisono\[onnx\]"'),
    ],
)
def test_what_is_missing_is_named_with_what_to_write(tmp_path, monkeypatch, format, path, text):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=text):
        export(small(), tmp_path / path, format=format)
    assert not list(tmp_path.iterdir())


def test_a_saved_model_is_not_loaded_without_tensorflow(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "saved_model.pb").write_text("")
    with pytest.raises(ImportError, match=r"A SavedModel needs tensorflow, which is not installed"):
        load_exported(tmp_path)
