"""State that replicas assign: batch statistics, random numbers, counters."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from sizes import ROWS_AT_ONCE, cases, mostly_slow
from trainings import assert_equals_keras, assert_same_bits, crossentropy, fitting, labels, net, on, rows, run, tanh

X, Y = rows(43, 5) * 2 + 1, labels(43, 3)
FIT = fitting(X, Y, batch_size=ROWS_AT_ONCE)
WORDS = np.where(np.arange(4) < np.arange(43)[:, None] % 5, np.arange(43 * 4).reshape(43, 4) % 11 + 1, 0)
"""Sentences of 0, 1, .. 4 words."""


def classifier(*stack):
    return net(*stack, 3, loss=crossentropy(), optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9))


def normalization(momentum):
    return lambda: layers.BatchNormalization(momentum=momentum)


def dropout(rate):
    return lambda: layers.Dropout(rate)


IMAGES = lambda: layers.Conv2D(4, 3), layers.BatchNormalization, lambda: layers.SpatialDropout2D(0.3), layers.Flatten
STACKS = {
    "dense": (classifier(7, layers.BatchNormalization, dropout(0.4)), X, Y),
    "images": (classifier(*IMAGES), rows(43, 6, 6, 2), Y),
    "under a mask": (
        classifier(lambda: layers.Embedding(12, 4, mask_zero=True), layers.BatchNormalization), WORDS, labels(43, 3, 4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", mostly_slow(STACKS, "dense"))
def test_batch_normalization_and_dropout_on_every_placement(name):
    """Statistics and random numbers of a replica's rows: equal bits, some replicas without rows, two epochs, evaluated in between."""
    make, x, y = STACKS[name]
    fit = fitting(x, y, batch_size=ROWS_AT_ONCE, epochs=2, shuffle=True, **cases({}, {"validation_data": (x[:13], y[:13])}))
    ours = assert_same_bits(make, fit, devices=cases((1, 3), (1, 2, 3, 8)))
    assert all(np.isfinite(np.asarray(w.value)).all() for w in ours.model.weights)


@pytest.mark.parametrize("parts", [(3, 3, 2, 2), (1, 1, 1)])
def test_the_moving_variance_is_the_mean_of_the_replicas(parts):
    """(momentum) old + (1 - momentum) times the replicas' variances, weighted by rows. Rows alone have none, and replicas without rows add
    nothing."""
    count, strategy = sum(parts), on(3, 4) if sum(parts) > 4 else on(3)
    layer = run(classifier(normalization(0.8)), fitting(X[:count], Y[:count], batch_size=10), strategy).model.layers[0]
    shards = np.split(X[:count], np.cumsum(parts)[:-1])
    expected = 0.8 + 0.2 * sum(len(shard) / count * shard.var(axis=0) for shard in shards)
    np.testing.assert_allclose(layer.moving_variance.value, expected, rtol=1e-5)
    np.testing.assert_allclose(layer.moving_mean.value, 0.2 * X[:count].mean(axis=0), rtol=1e-5)


@pytest.mark.slow
def test_a_frozen_batch_normalization_is_plain_keras():
    """It keeps its statistics and looks at no batch: the layers around it train as on whole batches."""
    begin = {"moving_mean_initializer": "random_normal", "gamma_initializer": "random_normal"}
    make = classifier(tanh(6), lambda: layers.BatchNormalization(trainable=False, **begin))
    plain, ours = assert_equals_keras(make, FIT).model, run(make, FIT, on(3)).model
    fresh = run(make, lambda model: model.build((None, 5))).model
    for model in (plain, ours):
        assert un.fingerprint(model.layers[1]) == un.fingerprint(fresh.layers[1])


# Random numbers.


# State that a layer assigns in its forward pass.


class Assigning(layers.Layer):
    def __init__(self, value, dtype="float32", **options):
        super().__init__()
        self.of = value
        self.own = self.add_weight(shape=(), initializer="zeros", dtype=dtype, name="own", **({"trainable": False} | options))

    def call(self, x):
        self.own.assign(self.of(self.own, x))
        return x


def assigning(value, *dtype, **options):
    return lambda: Assigning(value, *dtype, **options)


STATE = {
    "a counter of steps": assigning(lambda own, x: own + 1, "int32"),
    "a counter of rows": assigning(lambda own, x: own + ops.shape(x)[0], "int32"),
    "an integer that depends on the rows": assigning(lambda own, x: ops.cast(ops.sum(ops.round(x)), "int32"), "int32"),
    "a short integer": assigning(lambda own, x: ops.cast(16 * ops.round(x[0, 0]), "uint8"), "uint8"),
    "a truth value": assigning(lambda own, x: ops.mean(x) > -1, "bool"),
    "a complex number": assigning(lambda own, x: ops.cast(ops.sum(x), "complex64") * 1j, "complex64"),
    "a mean": assigning(lambda own, x: 0.9 * own + 0.1 * ops.mean(x)),
    "a sum": assigning(lambda own, x: own + ops.sum(ops.square(x))),
    "a sum that decays": assigning(lambda own, x: 0.5 * own + ops.sum(x)),
    "a largest value": assigning(lambda own, x: ops.maximum(own, ops.max(x))),
    "a sum of what is assigned": assigning(lambda own, x: ops.sum(x), aggregation="sum"),
    "the first row": assigning(lambda own, x: x[0, 0], aggregation="only_first_replica"),
}


@pytest.mark.parametrize("what", mostly_slow(STATE, "an integer that depends on the rows", "a sum that decays", "the first row"))
def test_state_that_the_forward_pass_assigns(what):
    """It is that of plain Keras, whatever it is made of, and whatever `aggregation` says."""
    make, fit = classifier(STATE[what]), fitting(X[:17], Y[:17], batch_size=10)
    if what == "a complex number":  # of which there is no distance of weights
        ours, plain = (run(make, fit, strategy).model for strategy in (on(1, 4), None))
        np.testing.assert_allclose(ours.layers[0].own.value, plain.layers[0].own.value, rtol=1e-5)
    else:
        plain = assert_equals_keras(make, fit, replicas=(4,)).model
    assert np.asarray(plain.layers[0].own.value).any()
