"""State that replicas assign: batch statistics, random numbers, counters."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from sizes import ROWS_AT_ONCE, cases, mostly_slow, slow
from trainings import assert_equals_keras, assert_same_bits, fitting, labels, on, rows, run

X, Y = rows(43, 5) * 2 + 1, labels(43, 3)


def classifier(*stack):
    def make():
        model = keras.Sequential([*(layer() for layer in stack), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return make


def test_batch_normalization_and_dropout_on_every_placement():
    """Statistics and random numbers of a replica's rows: equal bits, some replicas without rows, two epochs."""
    stack = [lambda: layers.Dense(7), layers.BatchNormalization, lambda: layers.Dropout(0.4)]
    ours = assert_same_bits(
        classifier(*stack), fitting(X, Y, batch_size=ROWS_AT_ONCE, epochs=2, shuffle=True), devices=cases((1, 3), (1, 2, 3, 8))
    )
    assert all(np.isfinite(np.asarray(w.value)).all() for w in ours.model.weights)


@pytest.mark.slow
def test_a_convolutional_net_with_batch_normalization():
    """The same for images, evaluated in between."""
    stack = [lambda: layers.Conv2D(4, 3), layers.BatchNormalization, lambda: layers.SpatialDropout2D(0.3), layers.Flatten]
    x = rows(43, 6, 6, 2)
    assert_same_bits(classifier(*stack), fitting(x, Y, batch_size=ROWS_AT_ONCE, epochs=2, validation_data=(x[:13], Y[:13])))


@pytest.mark.parametrize("momentum", [0.9, *slow(0.8, 0.99)])
def test_the_moving_mean_is_that_of_all_rows(momentum):
    """Replicas' means weighted by their rows are the mean of the whole batch, as in plain Keras."""
    make = classifier(lambda: layers.BatchNormalization(momentum=momentum))
    plain, ours = (run(make, fitting(X, Y, batch_size=ROWS_AT_ONCE), strategy).model.layers[0] for strategy in (None, on(3)))
    np.testing.assert_allclose(ours.moving_mean.value, plain.moving_mean.value, rtol=1e-5)


def test_the_moving_variance_is_the_mean_of_the_replicas():
    """One batch of ten rows: (momentum) old + (1 - momentum) times the replicas' variances, weighted by rows."""
    layer = run(
        classifier(lambda: layers.BatchNormalization(momentum=0.8)), fitting(X[:10], Y[:10], batch_size=10), on(3, 4)
    ).model.layers[0]
    parts = np.split(X[:10], [3, 6, 8])
    expected = 0.8 + 0.2 * sum(len(part) / 10 * part.var(axis=0) for part in parts)
    np.testing.assert_allclose(layer.moving_variance.value, expected, rtol=1e-5)


@pytest.mark.slow
def test_predictions_of_batch_normalization_are_normal():
    """After some epochs the outputs at predict have mean 0 and standard deviation 1."""

    def make():
        model = keras.Sequential([layers.BatchNormalization(momentum=0.8)])
        model.compile(keras.optimizers.SGD(0.0001), "mse")
        return model

    x = rows(1000, 4) * 5 + 10
    model = run(make, fitting(x, x, batch_size=128, epochs=4), on(3, 4)).model
    outputs = model.predict(x, verbose=0)
    np.testing.assert_allclose(outputs.mean(axis=0), 0, atol=0.1)
    np.testing.assert_allclose(outputs.std(axis=0), 1, atol=0.1)


@pytest.mark.slow
def test_one_replica_draws_what_keras_draws():
    """With R = 1, dropout and noise in two layers: the weights of plain Keras."""
    stack = [lambda: layers.Dense(7), lambda: layers.Dropout(0.4), lambda: layers.GaussianNoise(0.1), lambda: layers.Dropout(0.3)]
    assert_equals_keras(classifier(*stack), fitting(X, Y, batch_size=ROWS_AT_ONCE), replicas=(1,), tolerance=1e-5)


class Kept(layers.Layer):
    """Keeps a mask of one row."""

    def build(self, shape):
        self.dropout = layers.Dropout(0.5)
        self.seen = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.seen.assign(self.dropout(ops.ones((1, *x.shape[1:])), training=True)[0])
        return x


@pytest.mark.slow
def test_layers_draw_different_masks():
    """A mask of no rows is one for all replicas, as in Keras, and two layers of one shape differ."""
    plain = assert_equals_keras(
        classifier(lambda: layers.Dense(64), Kept, Kept), fitting(X[:8], Y[:8], batch_size=8), replicas=(4,)
    )
    one, two = (np.asarray(layer.seen.value) for layer in plain.model.layers[1:3])
    assert not np.array_equal(one, two)


@pytest.mark.slow
def test_random_state_moves_on_as_in_keras():
    """After five steps every seed generator stands where it stands in plain Keras."""
    make = classifier(lambda: layers.Dense(7), lambda: layers.Dropout(0.4), lambda: layers.Dropout(0.4))
    plain, ours = (run(make, fitting(X, Y, batch_size=ROWS_AT_ONCE), strategy).model for strategy in (None, on(3)))
    states = [[np.asarray(v.value).tolist() for v in model.non_trainable_variables] for model in (ours, plain)]
    assert states[0] == states[1] != [[0, 0], [0, 0]]


@pytest.mark.slow
def test_dropout_is_for_training_only():
    """Nearly everything is dropped in fit, and nothing in predict and evaluate."""
    model = run(classifier(lambda: layers.Dropout(0.9999)), fitting(X, Y, batch_size=ROWS_AT_ONCE), on(3)).model
    expected = X @ np.asarray(model.layers[-1].kernel.value) + np.asarray(model.layers[-1].bias.value)
    np.testing.assert_allclose(model.predict(X, batch_size=ROWS_AT_ONCE, verbose=0), expected, rtol=1e-4, atol=1e-5)
    before = un.fingerprint(model)
    model.evaluate(X, Y, batch_size=ROWS_AT_ONCE, verbose=0)
    assert un.fingerprint(model) == before


class Assigning(layers.Layer):
    """Assigns a variable of its own in the forward pass."""

    def __init__(self, value, dtype="int32", **options):
        super().__init__()
        self.of = value
        self.own = self.add_weight(shape=(), initializer="zeros", dtype=dtype, name="own", **({"trainable": False} | options))

    def call(self, x):
        self.own.assign(self.of(self.own, x))
        return x


STATE = {
    "a counter of steps": lambda: Assigning(lambda own, x: own + 1),
    "a counter of rows": lambda: Assigning(lambda own, x: own + ops.shape(x)[0]),
    "an integer that depends on the rows": lambda: Assigning(lambda own, x: ops.cast(ops.sum(ops.round(x)), "int32")),
    "a short integer": lambda: Assigning(lambda own, x: ops.cast(16 * ops.round(x[0, 0]), "uint8"), dtype="uint8"),
    "a truth value": lambda: Assigning(lambda own, x: ops.mean(x) > -1, dtype="bool"),
    "a mean": lambda: Assigning(lambda own, x: 0.9 * own + 0.1 * ops.mean(x), dtype="float32"),
    "a sum": lambda: Assigning(lambda own, x: own + ops.sum(ops.square(x)), dtype="float32"),
    "a sum that decays": lambda: Assigning(lambda own, x: 0.5 * own + ops.sum(x), dtype="float32"),
    "a largest value": lambda: Assigning(lambda own, x: ops.maximum(own, ops.max(x)), dtype="float32"),
    "a sum of what is assigned": lambda: Assigning(lambda own, x: ops.sum(x), dtype="float32", aggregation="sum"),
    "the first row": lambda: Assigning(lambda own, x: x[0, 0], dtype="float32", aggregation="only_first_replica"),
}
"""What a layer assigns in its forward pass."""


@pytest.mark.parametrize("what", mostly_slow(STATE, "an integer that depends on the rows", "a sum that decays", "the first row"))
def test_state_that_the_forward_pass_assigns(what):
    """It is that of plain Keras, whatever it is made of, and whatever `aggregation` says."""
    plain = assert_equals_keras(classifier(STATE[what]), fitting(X[:17], Y[:17], batch_size=10), replicas=(4,))
    assert np.asarray(plain.model.layers[0].own.value).any()


@pytest.mark.slow
def test_complex_state():
    """Assigned anew by each batch."""
    ours, plain = (
        run(
            classifier(lambda: Assigning(lambda own, x: ops.cast(ops.sum(x), "complex64") * 1j, dtype="complex64")),
            fitting(X[:10], Y[:10], batch_size=10),
            strategy,
        ).model.layers[0]
        for strategy in (on(1, 4), None)
    )
    np.testing.assert_allclose(ours.own.value, plain.own.value, rtol=1e-5)
