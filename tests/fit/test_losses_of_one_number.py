"""Losses that are one number for all rows: sums, means, and what is neither."""

from __future__ import annotations

import keras
import pytest
from keras import layers, ops

from sizes import ROWS_AT_ONCE, mostly_slow, slow
from trainings import assert_equals_keras, fitting, on, rows, run

X, Y = rows(43, 4), rows(43, 2, seed=1)


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


class AddsLater(layers.Layer):
    """Adds a sum over its rows from the third step on, whatever rows and weights are."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=shape[1:], initializer="ones")
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.steps.assign(self.steps + 1)
        self.add_loss(ops.where(self.steps > 2, ops.sum(x * self.kernel), 0.0))
        return x


def root(y, p):
    return ops.sqrt(ops.sum(ops.square(y - p)))


class Roots(keras.Sequential):
    """Computes the root of a sum."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return root(y, y_pred)


class LargestOfMany(layers.Layer):
    """Adds a number that is almost the same for all rows, though its gradient is that of one row alone."""

    def call(self, x):
        self.add_loss(ops.max(ops.tanh(6 + ops.sum(ops.square(x), axis=-1))))
        return x


MODELS = {
    "add_loss from the third step on": dense("mse", AddsLater),
    "add_loss behind zeros": dense("mse", AddsNothingYet),
    "a function that sums": dense(summed),
    "a function that averages": dense(averaged),
    "a loss with its own __call__": dense(Summed()),
    "add_loss": dense("mse", Adds),
    "compute_loss": of_class(Sums),
    "compute_loss of a compiled sum": of_class(Hands, summed),
    "compute_loss of a reduction": of_class(Hands, keras.losses.MeanSquaredError(reduction="sum")),
    "a function that takes a root": dense(root),
    "compute_loss that takes a root": of_class(Roots),
    "add_loss of the largest": dense("mse", LargestOfMany),
    "a sum where layers draw": dense(summed, dropout=0.3),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name",
    mostly_slow(
        MODELS,
        "add_loss from the third step on",
        "compute_loss that takes a root",
        "a sum where layers draw",
    ),
)
def test_a_number_for_all_rows_is_that_of_keras(name):
    """Over ragged batches, with validation."""
    assert_equals_keras(MODELS[name], fitting(X, Y, batch_size=ROWS_AT_ONCE, validation_data=(X[:11], Y[:11])))


@pytest.mark.parametrize("devices", [1, *slow(3)])
def test_a_loss_that_comes_later_has_the_same_bits_however_many_batches_a_call_takes(devices):
    def make(steps):
        def made():
            model = dense("mse", AddsLater)()
            model.compile(keras.optimizers.SGD(0.001), "mse", steps_per_execution=steps)
            return model

        return made

    fit = fitting(X[:32], Y[:32], batch_size=8)
    assert run(make(4), fit, on(devices, 4)).bits == run(make(1), fit, on(1, 4)).bits
