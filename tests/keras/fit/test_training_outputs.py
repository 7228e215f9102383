"""Nested inputs and outputs, several losses with weights, and losses and metrics that the model computes itself."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from sizes import ROWS_AT_ONCE, mostly_slow, slow
from trainings import assert_equals_keras, crossentropy, fitting, labels, rows

ONE, TWO = rows(43, 3), rows(43, 4, seed=3)
Y, CLASS = rows(43, 2, seed=4), labels(43, 3)
WEIGHT = np.abs(rows(43, seed=5))


def two_headed(**options):
    """A function that makes a model of two inputs and two outputs."""

    def make():
        one, two = keras.Input((3,), name="one"), keras.Input((4,), name="two")
        hidden = layers.Dense(5, "tanh")(layers.Concatenate()([one, two]))
        heads = {"value": layers.Dense(2, name="value")(hidden), "kind": layers.Dense(3, name="kind")(hidden)}
        model = keras.Model({"one": one, "two": two}, heads)
        model.compile(keras.optimizers.SGD(0.1), **options)
        return model

    return make


WEIGHTS_AND_METRICS = {
    "loss": {"value": "mse", "kind": crossentropy()},
    "loss_weights": {"value": 0.3, "kind": 1.7},
    "metrics": {"value": ["mae"], "kind": ["accuracy"]},
    "weighted_metrics": {"kind": [keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]},
}


@pytest.mark.parametrize("options", [WEIGHTS_AND_METRICS, *slow({"loss": {"value": "mse", "kind": None}})])
def test_loss_weights_metrics_and_sample_weights_of_each_output(options):
    """With validation. An output that has no loss takes no part."""
    x, y = {"one": ONE, "two": TWO}, {"value": Y, "kind": CLASS}
    weight = {"value": WEIGHT, "kind": WEIGHT[::-1].copy()} if options is WEIGHTS_AND_METRICS else None
    held_out = ({"one": ONE[:13], "two": TWO[:13]}, {"value": Y[:13], "kind": CLASS[:13]})
    fit = fitting(x, y, sample_weight=weight, batch_size=ROWS_AT_ONCE, validation_data=held_out)
    assert_equals_keras(two_headed(**options), fit)


class Nested(keras.Model):
    """A subclassed model that takes a dict of a tuple and an array, and returns a tuple: structures that no functional model has."""

    def __init__(self):
        super().__init__()
        self.dense, self.value, self.kind = layers.Dense(5, "tanh"), layers.Dense(2), layers.Dense(3)
        self.spread = keras.metrics.Mean(name="spread")

    def call(self, inputs):
        hidden = self.dense(ops.concatenate([*inputs["pair"], inputs["two"]], axis=-1))
        return self.value(hidden), self.kind(hidden)


class OwnLoss(Nested):
    """Computes its loss itself, from everything that Keras hands it."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        assert training in (True, False)
        rows_ = ops.sum(ops.square(y[0] - y_pred[0]), axis=-1) + 0.1 * ops.sum(ops.abs(x["two"]), axis=-1)
        return ops.mean(rows_ * (1.0 if sample_weight is None else sample_weight[0]))


class TwoCalls(Nested):
    """Calls the loss of compile() on all positions and, with another weight and a mask, on the first of them."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        whole = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        first = [part[:, :1] for part in y_pred[:1]] + [y_pred[1]]
        mask = ops.cast(x["two"][:, 0] > 0, "float32")
        some = super().compute_loss(x=x, y=(y[0][:, :1], y[1]), y_pred=first, sample_weight=(None, mask), training=training)
        return whole + 0.5 * some + 0.2 * ops.mean(ops.square(y_pred[1]))


class OwnMetrics(Nested):
    """Follows a metric of its own, and logs a number that is no metric."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.spread.update_state(ops.mean(ops.abs(y_pred[0]), axis=-1))
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"size": ops.mean(ops.square(y_pred[1]))}


def nested(kind, reduction="sum_over_batch_size", **options):
    def make():
        model = kind()
        losses = [keras.losses.MeanSquaredError(reduction=reduction), crossentropy(reduction=reduction)]
        model.compile(keras.optimizers.SGD(0.01), loss=losses, **options)
        return model

    return make


BOTH = (WEIGHT, WEIGHT)
NESTED = {
    "no more": (nested(Nested), None),
    "a loss of its own": (nested(OwnLoss), BOTH),
    "two calls": (nested(TwoCalls), None),
    "two weighted calls": (nested(TwoCalls), BOTH),
    "two calls of a sum": (nested(TwoCalls, "sum"), BOTH),
    "two calls of a weighted mean": (nested(TwoCalls, "mean_with_sample_weight"), BOTH),
    "metrics of its own": (nested(OwnMetrics, metrics=[["mae"], ["accuracy"]]), None),
}


@pytest.mark.parametrize("name", mostly_slow(NESTED, "two calls of a weighted mean", "metrics of its own"))
def test_a_subclassed_model_that_computes_losses_or_metrics(name):
    """Each call of the compiled loss is divided by what Keras divides that call by, and what is updated counts every row once."""
    make, weights = NESTED[name]
    x = {"pair": (ONE, ONE[::-1].copy()), "two": TWO}
    plain = assert_equals_keras(make, fitting(x, (Y, CLASS), sample_weight=weights, batch_size=ROWS_AT_ONCE))
    assert ({"spread", "size"} <= set(plain.logs)) == (name == "metrics of its own")
