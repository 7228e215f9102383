"""Models of every kind: made in a scope, saved, copied, opened without Unisono, and Keras untouched outside."""

import contextlib
import copy
import json
import os
import pickle
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from sizes import BATCH, ROWS, cases, slow
from trainings import assert_equals_keras, crossentropy, distance, fitting, labels, on, rows, run

X, Y = rows(ROWS, 5), labels(ROWS, 3)


def compiled(model):
    model.compile(keras.optimizers.Adam(0.02), crossentropy(), metrics=["accuracy"])
    return model


def sequential():
    return compiled(keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3)]))


def unbuilt():
    return compiled(keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(3)]))


def functional():
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, "tanh")(inputs)
    return compiled(keras.Model(inputs, layers.Dense(3)(hidden)))


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.hidden, self.last = layers.Dense(6, "tanh"), layers.Dense(3)

    def call(self, x):
        return self.last(self.hidden(x))


def subclassed():
    return compiled(Subclassed())


def nested():
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh")])
    return compiled(keras.Sequential([keras.Input((5,)), inner, layers.Dense(3)]))


KINDS = [sequential, unbuilt, functional, subclassed, nested]
FIT = fitting(X, Y, batch_size=BATCH)


@pytest.mark.parametrize("kind", [subclassed, *slow(*(kind for kind in KINDS if kind is not subclassed))])
def test_every_kind_of_model_equals_keras(kind):
    """Sequential, built or not, functional, subclassed, and a model in a model."""
    assert_equals_keras(kind, FIT, devices=(3,), tolerance=1e-5)


def test_kinds_of_one_architecture_have_one_fingerprint():
    """How the same layers were put together decides no bit."""
    prints = {un.fingerprint(run(kind, FIT, on(3)).model) for kind in cases([unbuilt, functional, nested], KINDS)}
    assert len(prints) == 1


@pytest.mark.processes
@pytest.mark.slow
def test_what_is_saved_opens_where_unisono_is_not(tmp_path):
    """In a process that cannot import Unisono: the model, its weights, and a step of training."""
    model = run(sequential, FIT, on(3)).model
    model.save(tmp_path / "model.keras")
    program = f"""
import sys
sys.modules["unisono"] = None
import json, keras, numpy as np
model = keras.saving.load_model({str(tmp_path / "model.keras")!r})
outputs = model.predict(np.ones((2, 5), "float32"), verbose=0).tolist()
model.fit(np.ones((2, 5)), np.zeros(2), verbose=0)
print(json.dumps(outputs))
"""
    environment = os.environ | {"KERAS_BACKEND": "jax"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    found = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(found, model.predict(np.ones((2, 5), "float32"), verbose=0), rtol=1e-5, atol=1e-6)


COPIES = {
    "clone_model": lambda model: keras.models.clone_model(model),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("way", [*list(COPIES)[:1], *slow(*list(COPIES)[1:])])
def test_copies_made_outside_the_scope_are_plain_models(way):
    """A copy trains as plain Keras trains it, and the model that it was made of stays as it was."""
    model = run(sequential, FIT, on(3)).model
    before = un.fingerprint(model)
    found = COPIES[way](model)
    if way != "clone_model":
        assert un.fingerprint(found) == before
    found.set_weights([np.asarray(w.value) for w in model.weights])
    FIT(compiled(found))
    plain = compiled(keras.models.clone_model(model))
    plain.set_weights([np.asarray(w.value) for w in model.weights])
    FIT(plain)
    assert un.fingerprint(found) == un.fingerprint(plain), "the copy runs Keras' own step"
    assert un.fingerprint(model) == before


@pytest.mark.parametrize("way", slow(*COPIES))
def test_copies_made_inside_the_scope_belong_to_the_strategy(way):
    """A copy made in a scope trains like the model that it was made of."""
    strategy = on(3)
    model = run(sequential, FIT, strategy).model
    with strategy.scope():
        found = COPIES[way](model)
    found.set_weights([np.asarray(w.value) for w in model.weights])
    for one in (model, found):
        FIT(compiled(one))
    assert un.fingerprint(found) == un.fingerprint(model)


def public_callables():
    for name in dir(keras.Model):
        yield f"Model.{name}", getattr(keras.Model, name)
    for module in (keras, keras.layers, keras.losses, keras.metrics, keras.optimizers, keras.callbacks, keras.utils):
        for name in dir(module):
            thing = getattr(module, name)
            yield f"{module.__name__}.{name}", thing
            if isinstance(thing, type):
                for attribute, value in vars(thing).items():
                    yield f"{module.__name__}.{name}.{attribute}", value


def test_keras_is_the_stock_object_outside_a_scope():
    """Every public class, function and method is the same object before, between and after scopes and fits."""
    before = dict(public_callables())
    model = run(sequential, FIT, on(3)).model
    model.predict(X, verbose=0)
    with pytest.raises(ZeroDivisionError), on(1).scope():
        _ = 1 / 0
    after = dict(public_callables())
    changed = [name for name, thing in before.items() if callable(thing) and name in after and not same(after[name], thing)]
    assert changed == []
    assert before.keys() == after.keys()


def same(one, other):
    return one is other or getattr(one, "__func__", one) is getattr(other, "__func__", None) or one == other


def test_a_model_made_outside_is_plain():
    """Next to models of a scope, one made outside runs Keras' own train function and has nothing of ours."""
    run(sequential, FIT, on(3))
    plain = sequential()
    assert plain.fit.__func__ is keras.Model.fit
    assert plain.make_train_function.__func__ is keras.Model.make_train_function
    assert not [name for name in vars(plain) if "unisono" in name]


@pytest.mark.parametrize("fixed", [BATCH, *slow(BATCH // 4, 3)])
def test_a_batch_size_that_the_inputs_fix(fixed):
    """It may be that of the global batch, as for whoever wrote the model, or that of a replica; and plain Keras takes other batches too."""

    def make():
        inputs = keras.Input((5,), batch_size=fixed)
        model = keras.Model(inputs, layers.Dense(2)(layers.Reshape((6,))(layers.Dense(6, "tanh")(inputs))))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    y = rows(ROWS, 2, seed=1)

    def fit(model):
        history = fitting(X, y, batch_size=BATCH, validation_data=(X[:5], y[:5]))(model)
        assert model.predict(X, batch_size=BATCH, verbose=0).shape == (ROWS, 2)
        return history

    assert_equals_keras(make, fit, replicas=(4,), devices=(3,))


class Projecting(keras.Model):
    """Has a layer that its loss alone calls."""

    def __init__(self, trainable):
        super().__init__()
        self.dense = layers.Dense(3)
        self.head = layers.Dense(3, trainable=trainable)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(self.head(y_pred)))


@pytest.mark.filterwarnings("ignore:.build")  # of Keras
@pytest.mark.parametrize(("trainable", "replicas"), [(True, 4), *slow((True, 1), (False, 4))])
def test_a_layer_that_a_step_builds_is_named(trainable, replicas):
    with on(1, replicas).scope():
        model = Projecting(trainable)
    model.compile("sgd")
    text = r"the model 'projecting(_\d+)?' made the variable '.*kernel'.* Build the layer before the model is trained"
    with pytest.raises(ValueError, match=text):
        model.fit(X[:8], batch_size=8, verbose=0)
    with on(1, replicas).scope():
        model = Projecting(trainable)
        model.head.build((None, 3))
    model.compile("sgd")
    model.fit(X[:8], batch_size=8, verbose=0)


class Squeezing(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.dense = layers.Embedding(9, 4), layers.Dense(3)

    def call(self, ids):
        return self.dense(keras.ops.squeeze(self.embedding(ids)))


@pytest.mark.filterwarnings("ignore:.build")  # of Keras
def test_an_error_of_a_replica_of_one_row_says_so():
    """Where every batch has more rows, the code is right for one replica."""
    ids = np.arange(9)[:, None]
    with on(1, 4).scope():
        model = Squeezing()
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="expected min_ndim=2") as caught:
        model.fit(ids, ids[:, 0] % 3, batch_size=4, verbose=0)
    assert "A replica has one row of a batch of shapes" in caught.value.__notes__[-1]
    assert "ops.squeeze(x, axis=1)" in caught.value.__notes__[-1]


class LooksAtRows(layers.Layer):
    def call(self, x):
        return x + ops.softmax(x @ ops.transpose(x)) @ x


class CountsRows(layers.Layer):
    def call(self, x):
        return ops.tanh(x) if x.shape[0] == 16 else x * 2

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


OF_SIXTEEN = lambda y, z: ops.mean(ops.square(y - ops.reshape(z, (16, 3))))
OTHER = r"is another program for another number of rows, or fails on it: each step is computed for the whole batch at once"


@pytest.mark.parametrize(
    ("layer", "loss", "said"),
    [
        (LooksAtRows, "sorts", "The layer 'second' looks at other rows of the batch: 1,536 bytes are gathered in each step"),
        (CountsRows, "mse", rf"The layer 'second' \(.*test_training_models\.py:\d+\) {OTHER}"),
        *slow((layers.ReLU, OF_SIXTEEN, f"The step of the model 'model' {OTHER}")),
    ],
)
def test_a_layer_that_needs_other_rows_is_named_once(capsys, layer, loss, said):
    """With the bytes that are gathered, or the line; losses may look at all rows without a word."""
    if loss == "sorts":
        loss = lambda y, z: ops.sqrt(ops.mean(ops.sort(ops.square(y - z), axis=0)))
    with on(1, 4).scope():
        parts = [layers.Input((8,)), layers.Dense(8, name="first"), layer(name="second"), layers.Dense(3, name="third")]
        model = keras.Sequential(parts, name="model")
        model.compile("sgd", loss)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    for _ in range(2):
        model.fit(x, x[:, :3], batch_size=16, verbose=0)
    lines = [line for line in capsys.readouterr().err.splitlines() if "rows" in line]
    assert len(lines) == 1
    assert re.match(said, lines[0])


class Centered(layers.Layer):
    """Subtracts the mean of each of some groups of neighbouring rows."""

    def __init__(self, groups=1):
        super().__init__()
        self.groups = groups

    def call(self, x):
        by_group = ops.reshape(x, (self.groups, -1, x.shape[-1]))
        return ops.reshape(by_group - ops.mean(by_group, axis=1, keepdims=True), ops.shape(x))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_layer_or_a_model_in_it_may_see_the_rows_of_its_replica(is_inner):
    def train(strategy, groups):
        keras.utils.set_random_seed(0)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            inner = keras.Sequential([layers.Input((8,)), Centered(groups)])
            model = keras.Sequential([layers.Input((5,)), layers.Dense(8, "tanh"), inner, layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        if strategy is not None:
            (inner if is_inner else inner.layers[0]).synchronized = False
        x = np.random.default_rng(0).normal(size=(16, 5)).astype("float32")
        model.fit(x, x[:, :3], batch_size=16, epochs=3, verbose=0, shuffle=False)
        return model

    assert distance(train(on(2, 4), 1), train(None, 4)) < 1e-6
