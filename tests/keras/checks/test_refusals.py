"""What would silently train something else is refused, in words that say what to write."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from trainings import assert_equals_keras, fitting, on, rows
from unisono._src.keras.checks.jax_errors import StepError

X, Y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")


def made(*more, replicas=2, devices=1, kind=keras.Sequential, **compile_):
    with on(devices, replicas).scope():
        model = kind([layers.Input((3,)), *more, layers.Dense(2)])
    model.compile(**({"optimizer": "sgd", "loss": "mse"} | compile_))
    return model


def test_gradient_accumulation_of_the_optimizer_is_answered_with_the_line():
    with pytest.raises(
        ValueError, match=r"gradient_accumulation_steps=6[\s\S]*OneDeviceStrategy\(accumulate=6\).*batch_size=6 times"
    ):
        made(optimizer=keras.optimizers.Adam(gradient_accumulation_steps=6))


def test_stateful_layers_are_refused_for_more_than_one_replica():
    with un.OneDeviceStrategy(replicas=2).scope():
        model = keras.Sequential([layers.Input((4, 3), batch_size=4), layers.LSTM(2, stateful=True, name="memory")])
    with pytest.raises(ValueError, match="'memory' is stateful"):
        model.compile("sgd", "mse")


@pytest.mark.parametrize("method", ["train_step", "test_step"])
def test_a_step_that_returns_no_state_is_refused(method):
    model = made(kind=type("Own", (keras.Sequential,), {method: lambda self, state, data: {"loss": 0.0}}))
    with pytest.raises(ValueError, match=f"(?s){method} must return logs and state.*returned dict.*return logs, \\(trainable"):
        model.fit(X, Y, verbose=0, validation_data=(X, Y))


SHORTER = {
    "train_step": (
        lambda tv, ntv, ov, mv: ({"loss": 0.0}, (tv, ntv, ov, [])),
        lambda model: model.fit(X, Y, verbose=0),
        "groups of 2, 0, 2, 0 arrays as its state, in place of 2, 0, 2, 2",
    ),
    "test_step": (
        lambda tv, ntv, mv: ({"loss": 0.0}, (tv, ntv, None)),
        lambda model: model.evaluate(X, Y, verbose=0),
        "groups of 2, 0, no arrays as its state, in place of 2, 0, 2",
    ),
    "predict_step": (
        lambda tv, ntv: (0.0, (tv, ntv)),
        lambda model: model.predict(X, verbose=0),
        "a state of 2 arrays in place of 0",
    ),
}


@pytest.mark.parametrize("method", SHORTER)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_returns_another_state_is_refused(method, replicas):
    finish, call, said = SHORTER[method]
    own = type("Own", (keras.Sequential,), {method: lambda self, state, data: finish(*state)})
    with pytest.raises(ValueError, match=f"{method} must return .* state, .* and returned {said}. End it with: return"):
        call(made(replicas=replicas, kind=own))


def test_a_wrong_feature_shape_is_refused_before_any_step():
    model = made()
    before = un.fingerprint(model.get_weights())
    with pytest.raises(ValueError, match=r"expected axis -1 of input shape to have value 3|expected shape=\(None, 3\), found"):
        model.fit(np.ones((8, 4)), Y, verbose=0)
    assert un.fingerprint(model.get_weights()) == before


def test_shapes_that_only_jax_finds_wrong_have_a_first_line_of_ours():
    class Wrong(layers.Layer):
        def call(self, x):
            return x

    layer = Wrong()
    model = made(layer)
    model.fit(X, Y, verbose=0)
    layer.call = lambda x: jax.numpy.dot(x, np.ones((7, 2), "float32"))
    model.make_train_function(force=True)
    with pytest.raises(
        StepError, match=r"A step of the model 'sequential\w*' could not run on a batch of shapes \(\(8, 3\), \(8, 2\)\)"
    ):
        model.fit(X, Y, verbose=0)


def test_a_loss_without_a_reduction_is_refused():
    model = made(loss=keras.losses.MeanSquaredError(reduction=None))
    with pytest.raises(ValueError, match="Write reduction='sum_over_batch_size'"):
        model.fit(X, Y, verbose=0)


class Drift(layers.Layer):
    """Assigns its weight, to what it makes of it."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x, training=False):
        if training:
            self.scale.assign(self.scale * (0.5 + ops.cast(self.scale > 2, "float32")))
        return x * self.scale


def test_trainable_state_that_the_forward_pass_assigns_by_the_weights_is_that_of_keras():
    """It is used in the step, and not kept."""

    def make():
        model = keras.Sequential([layers.Input((3,)), Drift(), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_equals_keras(make, fitting(rows(16, 3), rows(16, 2), batch_size=8))


@pytest.mark.slow
def test_frozen_layers_need_a_new_compile():
    model = made(layers.Dense(3))
    model.fit(X, Y, verbose=0)
    before = model.predict(X, verbose=0)
    model.layers[0].trainable = False
    assert np.array_equal(model.predict(X, verbose=0), before)
    model.evaluate(X, Y, verbose=0)
    with pytest.raises(ValueError, match=r"Write model.compile\(...\) again"):
        model.fit(X, Y, verbose=0)
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)


def test_layers_that_change_places_among_the_trainable_ones_are_seen():
    """As many variables are trained as before, but other ones; evaluation and prediction follow without compile()."""
    model = made(layers.Dense(3), layers.Dense(3))
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)
    model.layers[0].trainable, model.layers[1].trainable = True, False
    plain = keras.models.clone_model(model)
    plain.set_weights([np.array(weight) for weight in model.get_weights()])
    plain.compile("sgd", "mse")
    np.testing.assert_allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-6)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-6)
    with pytest.raises(ValueError, match=r"Write model.compile\(...\) again"):
        model.fit(X, Y, verbose=0)


def test_double_precision_is_refused():
    model = made()
    model.layers[0].kernel._dtype = "float64"
    with pytest.raises(ValueError, match=r"dtype float64 \('.*kernel' among them\)"):
        model.fit(X, Y, verbose=0)


class Shows(layers.Layer):
    def call(self, x):
        jax.debug.print("a replica")
        return x


def test_a_callback_to_python_is_compiled_for_each_device_and_says_so():
    model = made(Shows(), devices=2)
    with pytest.warns(UserWarning, match=r"compiled again for it.*OneDeviceStrategy\(replicas=R\)"):
        model.fit(X, Y, batch_size=8, verbose=0)


def test_a_distribution_of_keras_is_refused():
    model = made()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        with pytest.raises(ValueError, match=r"distribution of its own \(DataParallel\).*set_distribution\(None\)"):
            model.fit(X, Y, verbose=0)
    finally:
        keras.distribution.set_distribution(None)


class Centred(keras.layers.Layer):
    """Takes the mean over devices away, as a layer for jax.pmap does."""

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        return x - jax.lax.pmean(x.mean(axis=0), "batch")


def test_a_collective_in_a_layer_is_refused():
    model = made(Centred(name="centred"), devices=2)
    said = r"layer 'centred' of the model 'sequential\w*' uses a collective over an axis, .* leave the collective out. .* write replicas=1"
    with pytest.raises(ValueError, match=said):
        model.fit(X, Y, verbose=0)
