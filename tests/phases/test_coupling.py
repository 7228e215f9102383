"""A model with code of the user's own whose rows see one another is warned of before it is trained; other models are not, and cost nothing."""

from __future__ import annotations

import warnings

import jax
import keras
import pytest
from keras import layers, ops
from unisono._src.phases.coupling import sees_other_rows

import unisono as un
from sizes import mostly_slow
from trainings import on, rows
from unisono._src.keras_private.models import has_own_code

X = rows(32, 8)


class Own(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function_of_rows = function

    def call(self, x):
        return self.function_of_rows(x)


MIXED = {
    "centered": lambda x: x - ops.mean(x, axis=0),
    "rolled": lambda x: x + ops.roll(x, 1, axis=0),
    "reversed": lambda x: x + x[::-1],
    "sorted": lambda x: ops.sort(x, axis=0),
    "cumulative": lambda x: ops.cumsum(x, axis=0),
    "attention over the batch": lambda x: ops.softmax(x @ ops.transpose(x)) @ x,
    "in parts": lambda x: ops.reshape(ops.softmax(ops.reshape(x, (-1, 4)), axis=0), (-1, 8)),
    "the first row": lambda x: x + x[:1],
}
APART = {
    "features": lambda x: x - ops.mean(x, axis=1, keepdims=True),
    "in parts of a row": lambda x: ops.reshape(ops.softmax(ops.reshape(x, (-1, 4, 2)), axis=-1), (-1, 8)),
    "a loop over features": lambda x: ops.transpose(ops.scan(lambda c, v: (c + v, c + v), x[:, 0], ops.transpose(x))[1]),
    "a mean that is not used": lambda x: x + 0 * ops.stop_gradient(x),
    "one after another": lambda x: ops.map(lambda row: row / (1 + ops.sum(ops.square(row))), x),
}


def make(function, strategy):
    with strategy.scope():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(8), Own(function), layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def said_by(fit):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit()
    return [str(one.message) for one in said]


@pytest.mark.parametrize("how", mostly_slow(MIXED, "sorted", "the first row"))
def test_rows_that_see_one_another_are_warned_of_once(how):
    model = make(MIXED[how], on(1, 4))
    (word,) = said_by(lambda: [model.fit(X, X[:, :1], batch_size=16, verbose=0) for _ in range(2)])
    assert word.startswith("The model 'sequential")
    assert "not made of their parts" in word


@pytest.mark.parametrize("how", mostly_slow(APART, "in parts of a row", "one after another"))
def test_rows_of_their_own_are_not(how):
    model = make(APART[how], on(1, 4))
    assert said_by(lambda: model.fit(X, X[:, :1], batch_size=16, verbose=0)) == []


def test_one_replica_has_all_rows():
    model = make(MIXED["centered"], on(1, 1))
    assert said_by(lambda: model.fit(X, X[:, :1], batch_size=16, verbose=0)) == []


def test_operations_between_layers_are_code_of_the_users():
    inputs = layers.Input((8,))
    with un.OneDeviceStrategy(replicas=4).scope():
        hidden = layers.Dense(8, "relu")(inputs)
        centered = keras.Model(inputs, hidden - ops.mean(hidden, axis=0))
        stock = keras.Sequential([layers.Input((8,)), layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.5)])
        activated = keras.Sequential([layers.Input((8,)), layers.Dense(8, lambda x: ops.softmax(x, axis=0))])
        for model in (centered, activated):
            model.compile("sgd", "mse")
    assert [has_own_code(model) for model in (centered, stock, activated)] == [True, False, True]
    for model in (centered, activated):
        (word,) = said_by(lambda model=model: model.fit(X, X, batch_size=16, verbose=0))
        assert "not made of their parts" in word


def test_a_table_of_rows_has_a_warning_of_its_own():
    with on(1, 4).scope():
        model = keras.Sequential([layers.Input((8,)), Own(lambda x: ops.matmul(x, ops.transpose(x)))])
        model.compile("sgd", lambda y, p: ops.mean(p, axis=-1))
    (word,) = said_by(lambda: model.fit(X, X[:, :1], batch_size=16, verbose=0))
    assert "another axis than the first counts rows" in word


def test_a_loss_that_a_layer_adds_is_no_output():
    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(ops.mean(ops.square(x)))
            return x

    with on(1, 4).scope():
        model = keras.Sequential([layers.Input((8,)), Adding(), layers.Dense(1)])
        model.compile("sgd", "mse")
    assert said_by(lambda: model.fit(X, X[:, :1], batch_size=16, verbose=0)) == []


def test_code_for_one_number_of_rows_is_let_alone():
    def compute(state, x):
        return x - ops.mean(ops.reshape(x, (16, 8)), axis=0)

    def loop(state, x):
        return jax.lax.while_loop(lambda v: jax.numpy.any(v > 1), lambda v: v / 2, x)

    assert not sees_other_rows(compute, (), X)
    assert not sees_other_rows(loop, (), X)
    assert sees_other_rows(lambda state, x: x - ops.mean(x, axis=0), (), X)
