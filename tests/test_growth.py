"""Losses that are one number for all rows of a replica, weighted by how they grow with the rows: Keras' numbers, or a warning."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

from sizes import ROWS_AT_ONCE, slow
from trainings import assert_equals_keras, fitting, labels, on, rows, run

X, Y = rows(43, 4), rows(43, 2, seed=1)
CLASS = labels(43, 2)


def dense(loss, *more, kernel="glorot_uniform", dropout=0.0, **compile_):
    def make():
        made = [layers.Input((4,)), layers.Dense(5, "tanh"), layers.Dropout(dropout), *(layer() for layer in more)]
        model = keras.Sequential([*made, layers.Dense(2, kernel_initializer=kernel)])
        model.compile(keras.optimizers.SGD(0.001), loss, **compile_)
        return model

    return make


def summed(y, p):
    return ops.sum(ops.square(y - p))


def averaged(y, p):
    return ops.mean(ops.abs(y - p))


class Summed(keras.losses.Loss):
    """Does everything itself."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(ops.square(y_true - y_pred))


class Adds(layers.Layer):
    """Adds a sum and a mean over its rows to the loss, and has a regularized weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], regularizer="l2", initializer="ones")

    def call(self, x):
        x = x * self.scale
        self.add_loss(0.1 * ops.sum(ops.square(x)))
        self.add_loss(ops.mean(ops.abs(x)))
        return x


class Sums(keras.Sequential):
    """Computes a loss that is a sum over the rows."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sum(ops.square(y - y_pred))


class Hands(keras.Sequential):
    """Hands on what compile() has been given."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 2 * super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def of_class(kind, loss=None):
    def make():
        model = kind([layers.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.001), loss)
        return model

    return make


class AddsNothingYet(layers.Layer):
    """Adds a sum over its rows that is zero before the first step."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=shape[1:], initializer="zeros")

    def call(self, x):
        self.add_loss(ops.sum(x * self.kernel))
        return x


MODELS = {
    "add_loss behind zeros": dense("mse", AddsNothingYet),
    "a function that sums": dense(summed),
    "a function that averages": dense(averaged),
    "a loss with its own __call__": dense(Summed()),
    "add_loss": dense("mse", Adds),
    "compute_loss": of_class(Sums),
    "compute_loss of a compiled sum": of_class(Hands, summed),
    "compute_loss of a reduction": of_class(Hands, keras.losses.MeanSquaredError(reduction="sum")),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name", [*slow("a function that averages", "a loss with its own __call__"), *list(MODELS)[0:2], *list(MODELS)[4:]]
)
def test_a_number_for_all_rows_is_that_of_keras(name):
    """Over ragged batches, with validation."""
    assert_equals_keras(MODELS[name], fitting(X, Y, batch_size=ROWS_AT_ONCE, validation_data=(X[:11], Y[:11])))


def test_a_sum_is_found_where_replicas_draw():
    """Dropout makes another number of the same rows."""
    ours = run(dense(summed, dropout=0.3), fitting(X, Y, batch_size=20), on(1, 4))
    plain = run(dense(summed, dropout=0.3), fitting(X, Y, batch_size=20))
    np.testing.assert_allclose(ours.logs["loss"], plain.logs["loss"], rtol=0.2)


def test_what_is_neither_a_sum_nor_a_mean_is_said():
    def root(y, p):
        return ops.sqrt(ops.sum(ops.square(y - p)))

    with pytest.warns(UserWarning, match="The loss 'root'") as warned:
        run(dense(root), fitting(X, Y, batch_size=20), on(1, 4))
    assert any("(call 1) is made of all rows of a replica, and 1.4" in str(warning.message) for warning in warned)
