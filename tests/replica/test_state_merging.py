"""State and metrics that replicas change: merged exactly, or refused by name."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from own_metrics import Keeps
from sizes import cases, mostly_slow, slow

X, Y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")


def made(*more, replicas=2, **compile_):
    keras.utils.set_random_seed(0)
    with un.OneDeviceStrategy(replicas=replicas).scope():
        model = keras.Sequential([layers.Input((3,)), *more, layers.Dense(2)])
    model.compile(**({"optimizer": "sgd", "loss": "mse"} | compile_))
    return model


class Counting(layers.Layer):
    """Adds something to its state in every forward pass."""

    def __init__(self, dtype, amount, **kwargs):
        super().__init__(**kwargs)
        self.of, self.amount = dtype, amount

    def build(self, shape):
        self.count = self.add_weight(shape=(), dtype=self.of, initializer="zeros", trainable=False, name="count")

    def call(self, x):
        self.count.assign_add(ops.cast(self.amount(x), self.of))
        return x


NO_SUMS = {
    "largest": lambda old, y, _: ops.maximum(old, ops.max(y)),
    "last": lambda old, y, _: ops.sum(y),
    "decaying": lambda old, y, _: 0.5 * old + ops.sum(y),
}


class Flag(layers.Layer):
    """Keeps what `is_set` says of the rows."""

    def __init__(self, is_set, dtype="bool", aggregation=None, **kwargs):
        super().__init__(**kwargs)
        self.is_set, self.of, self.aggregation = is_set, dtype, aggregation

    def build(self, shape):
        how = {"dtype": self.of, "aggregation": self.aggregation}
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen", **how)

    def call(self, x):
        self.seen.assign(ops.cast(self.is_set(x), self.of))
        return x


@pytest.mark.parametrize("replicas", [4, *slow(1)])
def test_a_bool_is_what_all_replicas_say(replicas):
    model = made(Flag(lambda x: ops.sum(x) > 0), replicas=replicas)
    for x, seen in ((X, True), (-X, False), (X, True)):
        model.fit(x, Y, verbose=0)
        assert bool(model.layers[0].seen.value) is seen


@pytest.mark.parametrize("replicas", [4, *slow(1)])
def test_a_sum_of_what_replicas_assign(replicas):
    model = made(Flag(ops.sum, "float32", aggregation="sum"), replicas=replicas)
    for rows in (X, 2 * X):
        model.fit(rows, Y, batch_size=8, verbose=0)
        assert float(model.layers[0].seen.value) == rows.sum()


def test_one_replica_keeps_state_of_any_kind():
    """Nothing is merged, so that it may be what the rows say."""
    model = made(Flag(lambda x: ops.cast(x[0, 0], "complex64") * 1j, "complex64"), replicas=1)
    model.fit(2 * X, Y, verbose=0)
    assert complex(model.layers[0].seen.value) == 2j


def test_floating_counters_count_exactly():
    """The mean of equal changes is that change, however the rows lie."""
    model = made(Counting("float32", lambda x: 1.0), replicas=8)
    model.fit(np.ones((70, 3)), np.ones((70, 2)), batch_size=7, epochs=5, verbose=0)
    assert float(model.layers[0].count.value) == 50.0


def test_a_metric_of_sums_is_merged():
    model = made(metrics=[Keeps(lambda old, y, _: old + ops.sum(y), "total")], replicas=3)
    assert model.fit(X, Y, batch_size=5, verbose=0).history["total"] == [16.0]


@pytest.mark.parametrize("name", mostly_slow(NO_SUMS, "largest"))
def test_one_replica_keeps_metrics_of_any_kind(name):
    """Nothing is merged: the state goes on as in plain Keras."""
    y = np.arange(16, dtype="float32").reshape(8, 2)[::-1].copy()
    ours = made(metrics=[Keeps(NO_SUMS[name], name)], replicas=1)
    plain = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
    plain.compile("sgd", "mse", metrics=[Keeps(NO_SUMS[name], name)])
    histories = [model.fit(X, y, batch_size=3, shuffle=False, verbose=0).history for model in (ours, plain)]
    assert histories[0][name] == histories[1][name]


def test_a_loss_or_metric_over_the_batch_is_weighted_by_rows():
    """Values of another first axis than rows are means of the batch, also where a shard has as many rows as they are long."""

    def over_rows(y, p):
        return ops.mean(ops.square(y - p), axis=0)

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12, 3)).astype("float32"), rng.standard_normal((12, 2)).astype("float32")
    seen = []
    for replicas in cases((1, 5), (1, 5, 8)):
        model = made(replicas=replicas, loss=over_rows, metrics=[over_rows])
        history = model.fit(x, y, batch_size=12, shuffle=False, verbose=0).history
        seen.append([history["loss"][0], history["over_rows"][0]])
    np.testing.assert_allclose(seen[1:], [seen[0]] * (len(seen) - 1), rtol=1e-5)
