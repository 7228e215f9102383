"""Exports as StableHLO: the loaded model evaluates and trains as the one that was exported, in a scope and outside."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers, ops

import layer_groups
import sizes
import unisono as un
from sizes import mostly_slow, slow
from trainings import distance, fitting, labels, on, rows
from unisono._src.keras.checkpoint.files import load_checkpoint
from unisono._src.keras.replica import random_keys
from unisono._src.tools.export import export, load_exported, structure
from unisono._src.tools.export.loaded_model import LoadedModel

X, IMAGES, TOKENS, Y = rows(12, 6), rows(12, 6, 6, 1), labels(12, 20, 5), labels(12, 3)
TOKENS[::2, 3:] = 0
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def convolutional(**last):
    """Statistics, random numbers and a regularizer."""
    return keras.Sequential([
        keras.Input((6, 6, 1)),
        layers.Conv2D(3, 3, activation="relu", kernel_regularizer="l2", name="conv"),
        layers.BatchNormalization(name="norm"),
        layers.Flatten(name="flat"),
        layers.Dropout(0.5, name="drop"),
        layers.Dense(3, name="dense", **last),
    ])  # fmt: skip


def recurrent():
    """Masks, on the outputs too, and lengths that are left open."""
    inputs = keras.Input((None,), dtype="int32")
    hidden = layers.Embedding(20, 4, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(4, return_sequences=True, dropout=0.2)(hidden)))


def attentive():
    inputs = keras.Input((5, 4))
    hidden = layers.MultiHeadAttention(2, 2, dropout=0.1)(inputs, inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(hidden + inputs))))


def nested():
    """Several inputs and outputs in dicts and lists, and a loss that belongs to an output."""
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    both = layers.Dense(3, activity_regularizer="l2", name="both")(layers.Concatenate()([a, b]))
    return keras.Model({"b": b, "a": a}, {"z": both, "q": [layers.Dense(1)(b)]})


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.dropout, self.dense = layers.Embedding(20, 4), layers.Dropout(0.3), layers.Dense(3)

    def call(self, tokens):
        """The dropout hears from Keras whether it is training."""
        hidden = ops.mean(self.embedding(tokens), 1)
        self.add_loss(ops.mean(hidden**2))
        return self.dense(self.dropout(hidden))


def subclassed():
    model = Subclassed()
    model(TOKENS)
    return model


def in_half(policy):
    def make():
        keras.config.set_dtype_policy(policy)
        try:
            return convolutional(dtype="float32")
        finally:
            keras.config.set_dtype_policy("float32")

    return make


NESTED = {"a": rows(12, 4), "b": rows(12, 2, seed=1)}, {"z": Y, "q": [rows(12, 1)]}
GROUPS = {**layer_groups.EXACT, **layer_groups.OTHERS}
MODELS = {
    "convolution": (convolutional, IMAGES, Y, crossentropy, None),
    "mixed_float16": (in_half("mixed_float16"), IMAGES, Y, crossentropy, None),
    "mixed_bfloat16": (in_half("mixed_bfloat16"), IMAGES, Y, crossentropy, None),
    "LSTM": (recurrent, TOKENS, labels(12, 3, 5), crossentropy, None),
    "attention": (attentive, rows(12, 5, 4), Y, crossentropy, None),
    "dicts": (nested, *NESTED, {"z": crossentropy, "q": ["mse"]}, None),
    "subclass": (subclassed, TOKENS, Y, crossentropy, TOKENS[:1]),
}


ALL = mostly_slow(MODELS, "dicts", "subclass")


class Case:
    """A model that was exported once for all tests of it."""

    def __init__(self, name, directory):
        make, self.x, self.y, self.loss, example = MODELS[name]
        keras.utils.set_random_seed(0)
        self.model = make()
        for variable in self.model.non_trainable_variables:  # as if it had been trained: they are zeros and ones in a new model
            if keras.backend.is_float_dtype(variable.dtype):
                variable.assign(variable + np.random.default_rng(0).uniform(0.1, 1.0, variable.shape))
        self.path = export(self.model, directory / name.replace(" ", "_"), inputs=example)

    def load(self, strategy=None):
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            return self.compiled(load_exported(self.path))

    def compiled(self, model):
        model.compile(keras.optimizers.SGD(0.1), self.loss, metrics=None if isinstance(self.loss, dict) else ["accuracy"])
        return model

    def printed(self, model):
        """What Keras' progress bar shows after evaluate."""
        found = model.evaluate(self.x, self.y, batch_size=12, verbose=0, return_dict=True)
        return {name: f"{value:.4f}" for name, value in found.items()}

    def trained(self, strategy=None, batch_size=6):
        model = self.load(strategy)
        fitting(self.x, self.y, batch_size=batch_size, epochs=2)(model)
        return model


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}
    return lambda name: made.get(name) or made.setdefault(name, Case(name, tmp_path_factory.mktemp("exports")))


def small(**options):
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, **options)])


def flat(outputs):
    return [np.asarray(output) for output in keras.tree.flatten(outputs)]


def equal(ours, theirs):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(flat(ours), flat(theirs), strict=True))


# The same model.


@pytest.mark.parametrize("name", mostly_slow(MODELS, "convolution"))
def test_loss_and_accuracy_are_the_same_to_the_last_printed_digit(cases, name):
    """Of the model itself, and of the loaded one without a strategy and with one."""
    case = cases(name)
    loaded = case.load()
    assert case.printed(loaded) == case.printed(case.compiled(case.model))
    assert case.printed(case.load(on(2, 2))) == case.printed(loaded)


@pytest.mark.parametrize("name", ALL)
def test_outputs_are_the_same_to_the_bit_in_a_scope_and_outside(cases, name):
    case = cases(name)
    plain, ours, original = case.load()(case.x), case.load(on(2, 2))(case.x), case.model(case.x)
    assert equal(plain, ours)
    keras.tree.assert_same_structure(plain, original)
    assert [a.dtype for a in flat(plain)] == [a.dtype for a in flat(original)]
    for found, wanted in zip(flat(plain), flat(original), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("group", [name for name in GROUPS if name != "random patches"])  # MixUp shuffles a known number of rows
def test_layers_of_keras_predict_what_they_did(tmp_path, group):
    x, body = GROUPS[group]
    inputs = keras.Input(x.shape[1:], dtype=x.dtype)
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(body(inputs))))
    loaded = load_exported(export(model, tmp_path / "m"))
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


def test_variables_are_what_they_were(cases):
    case = cases("convolution")
    theirs, ours = keras.models.clone_model(case.model), case.load()
    theirs.set_weights(case.model.get_weights())
    theirs.layers[-2].seed_generator.state.assign(np.asarray(case.model.layers[-2].seed_generator.state))
    assert un.fingerprint(ours) == un.fingerprint(case.compiled(theirs))
    assert un.fingerprint(ours.get_weights()) == un.fingerprint(theirs.get_weights())
    assert [v.name for v in ours.variables] == [
        "layers.conv2d.0.kernel", "layers.conv2d.1.bias", "layers.batch_normalization.0.gamma", "layers.batch_normalization.1.beta",
        "layers.batch_normalization.2.moving_mean", "layers.batch_normalization.3.moving_variance", "seed_generator_state",
        "layers.dense.0.kernel", "layers.dense.1.bias",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_model_of_a_scope_is_exported_as_one_of_none(tmp_path):
    for name, strategy in (("plain", None), ("ours", on(2, 4))):
        keras.utils.set_random_seed(0)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            export(convolutional(), tmp_path / name)
    plain, ours = (load_checkpoint(tmp_path / name / "stablehlo_1") for name in ("plain", "ours"))
    assert plain.record == ours.record
    assert {name: a.tobytes() for name, a in plain.arrays.items()} == {name: a.tobytes() for name, a in ours.arrays.items()}


def test_the_files_hold_no_placement_and_no_paths(cases):
    case = cases("convolution")
    found = load_checkpoint(Path(case.path) / "stablehlo_1")
    assert sorted(found.record) == ["arrays", "export", "format", "seal", "versions"]
    programs = [a.tobytes() for name, a in found.arrays.items() if name.startswith("programs/")]
    assert [jax.export.deserialize(bytearray(code)).nr_devices for code in programs] == [1, 1]
    assert [jax.export.deserialize(bytearray(code)).platforms for code in programs] == [("cpu", "cuda", "tpu")] * 2
    assert [word for word in (b".py", b"keras/src", os.getcwd().encode()) if any(word in code for code in programs)] == []
    assert not list(Path(case.path).rglob("*sharding*"))
    assert [file for file in Path(case.path).rglob("*") if file.is_file() and file.read_bytes()[:1] == b"\x80"] == []  # a pickle


# Training.


@pytest.mark.parametrize("name", slow("convolution", "dicts", "LSTM", "mixed_float16"))
def test_training_has_the_same_bits_on_every_placement(cases, name):
    """Dropout and statistics; shards of two rows and of one."""
    case = cases(name)
    one, three = (case.trained(on(devices, 4), batch_size=sizes.cases(4, 7)) for devices in (1, 3))
    assert un.fingerprint(one) == un.fingerprint(three)
    assert un.fingerprint(one) != un.fingerprint(case.load())


@pytest.mark.slow
def test_training_goes_on_as_that_of_the_original(cases):
    """Up to rounding: with its regularizer, its statistics and the random numbers that it would have drawn."""
    case = cases("convolution")
    original = keras.models.clone_model(case.model)
    for ours, theirs in zip(original.variables, case.model.variables, strict=True):
        ours.assign(np.asarray(theirs))
    fitting(case.x, case.y, batch_size=12, epochs=2)(case.compiled(original))
    loaded = case.trained(batch_size=12)
    before, after = un.fingerprint(case.model.trainable_variables), un.fingerprint(loaded.trainable_variables)
    assert before != after
    assert distance(loaded, original) < 1e-6
    assert un.fingerprint([v for v in loaded.variables if random_keys.is_seed_state(v)]) == un.fingerprint(
        [v for v in original.variables if random_keys.is_seed_state(v)]
    )


def test_replicas_and_steps_draw_their_own_numbers(tmp_path):
    """Ones through two dropout layers, of which the exported program draws."""
    inputs = keras.Input((16,))
    path = export(keras.Model(inputs, [layers.Dropout(0.5)(inputs), layers.Dropout(0.5)(inputs)]), tmp_path / "m")
    drawn = {}
    for devices in (1, 3):
        strategy = on(devices, 4)
        with strategy.scope():
            model = load_exported(path)
        data = strategy.distribute_dataset([np.ones((8, 16), "float32")] * 2)
        runs = [strategy.run(lambda x, model=model: model(x, training=True), (batch,)) for batch in data]
        parts = [[np.asarray(one) for one in strategy.local_results(layer)] for run in runs for layer in run]
        assert len({array.tobytes() for replicas in parts for array in replicas}) == 2 * 2 * 4
        drawn[devices] = un.fingerprint(parts, model)
    assert drawn[1] == drawn[3]


@pytest.mark.slow
def test_one_layer_of_another_model(cases):
    """Frozen it stays what it is, statistics and random state too, and its gradient goes through it."""
    case = cases("convolution")
    prints = []
    for strategy in (on(1, 2), on(2, 2)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            body = load_exported(case.path)
            body.trainable = False
            model = keras.Sequential([layers.Conv2D(1, 1), body, layers.Dense(3)])
        before = un.fingerprint(body)
        fitting(case.x, case.y, batch_size=6)(case.compiled(model))
        assert un.fingerprint(body) == before
        prints.append(un.fingerprint(model))
    assert prints[0] == prints[1]


def test_frozen_layers_and_constraints_are_what_they_were(tmp_path):
    model = keras.Sequential([
        keras.Input((6,)),
        layers.Dense(4, trainable=False),
        layers.Dense(3, kernel_constraint=keras.constraints.UnitNorm(axis=0)),
    ])  # fmt: skip
    loaded = load_exported(export(model, tmp_path / "m"))
    assert [v.name for v in loaded.trainable_variables] == ["layers.dense_1.0.kernel", "layers.dense_1.1.bias"]
    frozen = un.fingerprint(loaded.non_trainable_variables)
    loaded.compile("sgd", "mse")
    loaded.fit(X, rows(12, 3), verbose=0)
    assert un.fingerprint(loaded.non_trainable_variables) == frozen
    np.testing.assert_allclose(np.linalg.norm(np.asarray(loaded.trainable_variables[0]), axis=0), 1, rtol=1e-5)


def test_a_constraint_of_ones_own_is_left_out_with_a_warning(tmp_path):
    class Positive(keras.constraints.Constraint):
        def __call__(self, w):
            return ops.abs(w)

    with pytest.warns(UserWarning, match=r"The constraint of layers\.dense\.0\.kernel is of a class of your own"):
        export(small(kernel_constraint=Positive()), tmp_path / "m")


# What callers give.


def test_lengths_that_are_the_same_in_all_inputs(tmp_path):
    """A sum of two sequences: an export with two lengths of their own would not fit together."""
    a, b = keras.Input((None, 2), name="a"), keras.Input((None, 2), name="b")
    loaded = load_exported(export(keras.Model([a, b], layers.Add()([a, b])), tmp_path / "m"))
    x = rows(3, 4, 2)
    assert np.array_equal(loaded([x, x]), x + x)
    assert np.array_equal(loaded({"b": x, "a": x}), x + x)


def test_inputs_are_converted_as_by_the_original(cases, tmp_path):
    loaded = load_exported(export(small(), tmp_path / "m"))
    assert equal(loaded(np.ones((2, 6), "int64")), loaded([np.ones((2, 6, 1), "float32")]))
    with pytest.raises(ValueError, match=r"takes 'input_0' of shape \(rows, 6\), and received \(2, 7\)"):
        loaded(np.ones((2, 7)))
    with pytest.raises(
        ValueError, match=r"takes 'input_0' and received \[\(2, 6\), \(2, 6\)\]\. Give it arrays in that structure"
    ):
        loaded([np.ones((2, 6))] * 2)
    with pytest.raises(ValueError, match=r"takes \{'b': 'b', 'a': 'a'\} and received \{'a': \(12, 4\)\}"):
        cases("dicts").load()({"a": NESTED[0]["a"]})
    with pytest.raises(
        TypeError, match=r"takes 'input_0' as int32, as in the example .* and received float32\. Convert it, or export"
    ):
        cases("subclass").load()(TOKENS.astype("float32"))


def test_it_is_saved_and_copied_by_keras(cases, tmp_path):
    case = cases("convolution")
    loaded = case.load()
    loaded.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert isinstance(again, LoadedModel)
    assert equal(again(case.x), loaded(case.x))
    assert case.printed(again) == case.printed(loaded)


@pytest.mark.slow
def test_it_goes_into_a_checkpoint_and_into_an_export(cases, tmp_path):
    case = cases("convolution")
    trained = case.trained(on(1, 2))
    checkpoint = un.Checkpoint(model=trained).save(tmp_path / "ckpt")
    again = case.load(on(2, 2))
    case.printed(again)
    un.Checkpoint(model=again).restore(checkpoint)
    assert un.fingerprint(again) == un.fingerprint(trained)
    twice = load_exported(export(trained, tmp_path / "twice"))
    assert equal(twice(case.x), trained(case.x))


# While fit runs.


@pytest.mark.parametrize("strategy", ["ours", *slow(None)])
def test_an_export_in_the_middle_of_fit_has_the_weights_of_then(tmp_path, strategy):
    with contextlib.nullcontext() if strategy is None else on(2, 2).scope():
        model = small()
    model.compile("sgd", "mse")
    prints = []

    def save(batch, logs):
        loaded = load_exported(export(model, tmp_path / f"batch_{batch}"))
        prints.append(un.fingerprint(loaded.trainable_variables))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=save)
    model.fit(X, rows(12, 3), batch_size=6, verbose=0, callbacks=[callback])
    assert prints[0] != prints[1] == un.fingerprint(model.trainable_variables)


def test_a_part_of_a_model_that_fit_trains_is_refused(tmp_path):
    part = small()
    model = keras.Sequential([part, layers.Dense(3)])
    model.compile("sgd", "mse")
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: export(part, tmp_path / "m"))
    with pytest.raises(
        ValueError, match=r"has no values of 2 variables \('sequential.*/kernel' among them\) now: it is part of a model"
    ):
        model.fit(X, rows(12, 3), verbose=0, callbacks=[callback])


def containers(inner):
    return st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner)


@given(tree=st.recursive(st.none() | st.integers(), containers))
def test_structures_come_back_from_json(tree):
    described, leaves = structure.flatten_tree(tree)
    assert structure.build_tree(json.loads(json.dumps(described)), leaves) == tree
