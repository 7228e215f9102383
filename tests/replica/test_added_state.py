"""State of the user's own layers that adds up over rows is told, and other state is not."""

import re
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from sizes import slow
from trainings import rows

X, Y = rows(24, 3), rows(24, 2, seed=1)


class Keeping(layers.Layer):
    """Changes its state in every forward pass of training."""

    def __init__(self, change, dtype="float32", initializer="zeros", **options):
        super().__init__()
        self.change = change
        self.state = self.add_weight(shape=(), dtype=dtype, initializer=initializer, trainable=False, name="state", **options)

    def call(self, x, training=False):
        if training:
            self.state.assign(self.change(self.state, x))
        return x


def fit(*inner, replicas=4, batch_size=8, epochs=2):
    keras.utils.set_random_seed(0)
    with un.OneDeviceStrategy(replicas=replicas).scope():
        model = keras.Sequential([keras.Input((3,)), *(make() for make in inner), layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=batch_size, epochs=epochs, verbose=0)
    return model


def count_rows(state, x):
    return state + ops.shape(x)[0]


def add_up(state, x):
    return state + ops.sum(ops.square(x))


def follow_mean(state, x):
    return 0.9 * state + 0.1 * ops.mean(ops.square(x))


def count_steps(state, _):
    return state + 1


def follow_sum(state, x):
    return 0.9 * state + 0.1 * ops.sum(ops.square(x))


def keep_largest(state, x):
    return ops.maximum(state, ops.max(ops.square(x)))


TOLD = [lambda: Keeping(count_rows, "int32"), lambda: Keeping(count_rows), lambda: Keeping(add_up)]
NOT_TOLD = [
    lambda: Keeping(count_steps, "int32"),
    lambda: Keeping(count_steps),
    lambda: Keeping(follow_mean),
    lambda: Keeping(add_up, aggregation="sum"),
    lambda: Keeping(count_rows, "int32", aggregation="sum"),
    layers.BatchNormalization,
]


@pytest.mark.parametrize("make", [TOLD[0], TOLD[2], *slow(TOLD[1])])
def test_what_adds_up_over_rows_is_told_once(make):
    text = r"adds up over the rows in 'keeping(_\d+)?/state'.* one R-th .*aggregation=\"sum\""
    with pytest.warns(UserWarning, match=text) as told:
        fit(make)
    assert len(told) == 1


@pytest.mark.parametrize("make", [lambda: Keeping(follow_sum, initializer="ones"), *slow(lambda: Keeping(keep_largest))])
def test_what_is_neither_a_mean_nor_a_sum_is_told_once(make):
    text = r"all rows in 'keeping(_\d+)?/state' is neither the mean nor the sum.* as a maximum, or a sum that decays"
    with pytest.warns(UserWarning, match=text) as told:
        fit(make)
    assert len(told) == 1


def test_other_state_is_not():
    """Nor is any with one replica."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(*NOT_TOLD)
        fit(*TOLD, replicas=1)


@pytest.mark.parametrize("batch_size", [*slow(8), 10])
def test_what_the_warning_says_to_write_counts_all_rows(batch_size):
    plain = fit(lambda: Keeping(count_rows, "int32"), lambda: Keeping(add_up), replicas=1, batch_size=batch_size)
    ours = fit(*NOT_TOLD[3:5][::-1], batch_size=batch_size)
    assert int(ours.layers[0].state.value) == int(plain.layers[0].state.value) == 48
    np.testing.assert_allclose(ours.layers[1].state.value, plain.layers[1].state.value, rtol=1e-6)


class Standardizing(layers.Layer):
    """Scales by the largest value and the number of rows that it has seen."""

    def __init__(self):
        super().__init__()
        zero = {"shape": (), "initializer": "zeros", "trainable": False}
        self.largest, self.seen = self.add_weight(**zero, name="largest"), self.add_weight(**zero, name="seen")

    def call(self, x):
        self.largest.assign(keep_largest(self.largest, x))
        self.seen.assign(count_rows(self.seen, x))
        return x * ops.sqrt(self.seen) / self.largest


class Adding(layers.Layer):
    def call(self, x):
        self.add_loss(ops.sqrt(ops.sum(ops.square(x))))
        self.add_loss(ops.mean(x))
        return x


def test_one_layer_is_told_in_one_warning_which_names_what_follows():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(Standardizing, Adding)
    of_outputs, of_state = [str(warning.message) for warning in said]
    assert "makes of all rows together" in of_outputs  # the largest value of all rows scales each of them
    first, others = of_state.split(" Probably for the same reason, these are not those of the whole batch either: ")
    assert re.search(r"makes of all rows in 'standardizing(_\d+)?/largest'", first)
    assert re.search(
        r"the variable 'standardizing(_\d+)?/seen', .*loss 1 of those that the layer '(\S*/)?adding(_\d+)?' adds", others
    )
