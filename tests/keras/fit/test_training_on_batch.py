"""train_on_batch, test_on_batch and predict_on_batch: one global batch, cut into replicas."""

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import ROWS_AT_ONCE, slow
from trainings import distance, fitting, labels, on, rows, run, weights

pytestmark = pytest.mark.compat

X, Y, WEIGHT = rows(43, 5), labels(43, 3), np.abs(rows(43, seed=5))


def make():
    model = keras.Sequential([layers.Dense(7, "tanh"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def batches():
    return [slice(start, start + ROWS_AT_ONCE) for start in range(0, 43, ROWS_AT_ONCE)]


def trained(strategy, **options):
    logs = []

    def fit(model):
        logs.extend(
            model.train_on_batch(X[b], Y[b], **{k: v[b] for k, v in options.items()}, return_dict=True) for b in batches()
        )

    return run(make, fit, strategy).model, [{name: float(value) for name, value in of.items()} for of in logs]


@pytest.mark.parametrize("options", [{"sample_weight": WEIGHT}, *slow({})])
def test_training_on_batches_equals_keras_and_fit(options):
    """Logs and weights of plain Keras, equal bits on every placement, and the bits of fit."""
    plain, plain_logs = trained(None, **options)
    ours = [trained(on(devices), **options) for devices in (1, 3)]
    assert ours[0][1] == ours[1][1]
    assert un.fingerprint(ours[0][0]) == un.fingerprint(ours[1][0])
    assert distance(ours[0][0], plain) <= 1e-6
    for a, b in zip(ours[0][1], plain_logs, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    fitted = run(make, fitting(X, Y, batch_size=ROWS_AT_ONCE, **options), on(3)).model
    assert un.fingerprint(weights(fitted)) == un.fingerprint(weights(ours[0][0]))


def test_testing_on_a_batch():
    """Loss and metrics of the rows, each counted once, as a list and as a dict."""
    plain, ours = (run(make, lambda model: model.build((None, 5)), strategy).model for strategy in (None, on(3)))
    for count in (11, 3):
        expected = plain.evaluate(X[:count], Y[:count], batch_size=11, verbose=0)
        np.testing.assert_allclose(ours.test_on_batch(X[:count], Y[:count]), expected, rtol=1e-5)
        ours.reset_metrics()
        assert set(ours.test_on_batch(X[:count], Y[:count], return_dict=True)) == {"loss", "accuracy"}
        ours.reset_metrics()


def test_predicting_on_a_batch():
    """Every row in order, with fewer rows than replicas too, as predict() gives them."""
    model = run(make, lambda model: model.build((None, 5)), on(3)).model
    for count in (11, 3, 1):
        found = model.predict_on_batch(X[:count])
        assert un.fingerprint(np.asarray(found)) == un.fingerprint(model.predict(X[:count], batch_size=count, verbose=0))


def test_fit_and_batches_in_turn():
    """A batch by hand between two fits: the order of the epochs goes on as if it had not been there."""

    def fit(model):
        fitting(X, Y, batch_size=ROWS_AT_ONCE, shuffle=True)(model)
        before = weights(model)
        model.train_on_batch(X[:ROWS_AT_ONCE], Y[:ROWS_AT_ONCE])
        for variable, value in zip(model.weights, before, strict=True):
            variable.assign(value)
        fitting(X, Y, batch_size=ROWS_AT_ONCE, shuffle=True)(model)

    ours = run(make, fit, on(3)).model
    straight = run(make, fitting(X, Y, batch_size=ROWS_AT_ONCE, epochs=2, shuffle=True), on(3)).model
    assert un.fingerprint(weights(ours)) == un.fingerprint(weights(straight))
