"""Metrics of an epoch are those of its real rows, each counted once, whatever the replicas and batches."""

from functools import partial

import keras
import pytest
from keras import layers, metrics, ops

from own_metrics import Keeps
from sizes import ROWS_AT_ONCE, mostly_slow
from trainings import assert_equals_keras, fitting, net, on, rows, run, tanh

X, BINARY = rows(43, 5), (rows(43, 1, seed=4) > 0).astype("float32")


def whole_batch(y_true, y_pred):
    """One number for all rows."""
    return ops.mean(ops.abs(y_true - y_pred))


def counts(name):
    """A metric of a user's that is a sum over rows, kept as an integer."""
    return Keeps(lambda old, y_true, y_pred: old + ops.sum(ops.cast(y_true > 0, old.dtype)), name, dtype="int32")


LOSSES = [
    partial(keras.losses.MeanSquaredError, reduction="sum"), keras.losses.MeanAbsoluteError, keras.losses.Dice,
]  # fmt: skip


def binary(*kinds):
    """A function that makes and compiles a classifier with fresh metrics, numbered: Keras numbers them on and on."""

    def fresh(number, metric):
        return metric if isinstance(metric, str) or metric is whole_batch else metric(name=f"metric_{number}")

    def make():
        made = [fresh(*numbered) for numbered in enumerate(kinds)]
        return net(tanh(7), lambda: layers.Dense(1, "sigmoid"), loss="binary_crossentropy", metrics=made)()

    return make


TRAININGS = {
    "one number for a batch": (binary(whole_batch), fitting(X, BINARY, batch_size=ROWS_AT_ONCE)),
    "integers": (binary(counts), fitting(X, BINARY, batch_size=ROWS_AT_ONCE, epochs=2)),
    "losses": (binary(*LOSSES), fitting(X[:26], BINARY[:26], batch_size=16)),
}


@pytest.mark.parametrize("name", mostly_slow(TRAININGS, "losses"))
def test_metrics_equal_those_of_keras(name):
    """Over ragged batches, some replicas without rows."""
    make, fit = TRAININGS[name]
    plain = assert_equals_keras(make, fit, devices=(3,))
    assert name != "integers" or plain.logs["metric_0"] == [int(BINARY.sum())] * 2


class Encoder(keras.Model):
    """Keeps a metric, which Keras leaves out where the model is a part of another one."""

    def __init__(self):
        super().__init__()
        self.dense, self.size = layers.Dense(4), keras.metrics.Mean(name="size")

    def call(self, x):
        codes = self.dense(x)
        self.size.update_state(ops.mean(ops.abs(codes), axis=-1))
        return codes


def test_a_metric_of_a_model_in_the_model_is_left_out():
    assert_equals_keras(net(Encoder, 2), fitting(rows(32, 3), rows(32, 2, seed=1), batch_size=8), replicas=(4,))


def test_metrics_start_anew_in_every_epoch_and_evaluation():
    """Nothing of training reaches an evaluation, nor of one epoch the next."""
    make = binary("mae", metrics.TruePositives)
    model = run(make, fitting(X, BINARY, batch_size=ROWS_AT_ONCE, epochs=2), on(3)).model
    first = model.evaluate(X[:13], BINARY[:13], batch_size=4, verbose=0)
    assert model.evaluate(X[:13], BINARY[:13], batch_size=4, verbose=0) == first
    history = fitting(X, BINARY, batch_size=ROWS_AT_ONCE)(model).history
    assert 0 <= history["metric_1"][0] <= BINARY.sum()
