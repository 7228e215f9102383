"""Nested inputs and outputs, several losses with weights, and losses and metrics that the model computes itself."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from sizes import ROWS_AT_ONCE, slow
from trainings import assert_equals_keras, fitting, labels, rows

ONE, TWO = rows(43, 3), rows(43, 4, seed=3)
Y, CLASS = rows(43, 2, seed=4), labels(43, 3)
WEIGHT = np.abs(rows(43, seed=5))
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy


def two_headed(outputs=dict, inputs=dict, **options):
    """A function that makes a model of two inputs and two outputs, in these containers."""

    def make():
        one, two = keras.Input((3,), name="one"), keras.Input((4,), name="two")
        hidden = layers.Dense(5, "tanh")(layers.Concatenate()([one, two]))
        heads = {"value": layers.Dense(2, name="value")(hidden), "kind": layers.Dense(3, name="kind")(hidden)}
        model = keras.Model(packed(inputs, one, two), packed(outputs, *heads.values(), names=("value", "kind")))
        model.compile(keras.optimizers.SGD(0.1), **options)
        return model

    return make


def packed(container, first, second, names=("one", "two")):
    return dict(zip(names, (first, second), strict=True)) if container is dict else container((first, second))


@pytest.mark.parametrize("container", slow(dict, list, tuple))
def test_containers_of_inputs_and_outputs(container):
    """Dicts, lists and tuples of inputs and outputs: total loss and the loss of each output equal plain Keras."""
    loss = packed(list if container is tuple else container, "mse", CROSSENTROPY(from_logits=True), ("value", "kind"))
    x, y = packed(container, ONE, TWO), packed(container, Y, CLASS, ("value", "kind"))
    plain = assert_equals_keras(two_headed(container, container, loss=loss), fitting(x, y, batch_size=ROWS_AT_ONCE))
    assert sorted(plain.logs) == ["kind_loss", "loss", "value_loss"]


def test_loss_weights_metrics_and_sample_weights_of_each_output():
    """Weights of losses and of the rows of each output, and metrics of each output, with validation."""
    make = two_headed(
        loss={"value": "mse", "kind": CROSSENTROPY(from_logits=True)},
        loss_weights={"value": 0.3, "kind": 1.7},
        metrics={"value": ["mae"], "kind": ["accuracy"]},
        weighted_metrics={"kind": [keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]},
    )
    x, y, weight = {"one": ONE, "two": TWO}, {"value": Y, "kind": CLASS}, {"value": WEIGHT, "kind": WEIGHT[::-1].copy()}
    held_out = ({"one": ONE[:13], "two": TWO[:13]}, {"value": Y[:13], "kind": CLASS[:13]})
    assert_equals_keras(make, fitting(x, y, sample_weight=weight, batch_size=ROWS_AT_ONCE, validation_data=held_out))


@pytest.mark.slow
def test_an_output_without_a_loss():
    """An output that has no loss takes no part."""
    make = two_headed(loss={"value": "mse", "kind": None})
    assert_equals_keras(make, fitting({"one": ONE, "two": TWO}, {"value": Y, "kind": CLASS}, batch_size=ROWS_AT_ONCE))


class Nested(keras.Model):
    """A subclassed model that takes a dict of a tuple and an array, and returns a tuple."""

    def __init__(self):
        super().__init__()
        self.dense, self.value, self.kind = layers.Dense(5, "tanh"), layers.Dense(2), layers.Dense(3)

    def call(self, inputs):
        hidden = self.dense(ops.concatenate([*inputs["pair"], inputs["two"]], axis=-1))
        return self.value(hidden), self.kind(hidden)


@pytest.mark.slow
def test_nested_inputs_of_a_subclassed_model():
    """Structures that no functional model has, each array cut alike."""

    def make():
        model = Nested()
        model.compile(keras.optimizers.SGD(0.1), loss=["mse", CROSSENTROPY(from_logits=True)])
        return model

    x = {"pair": (ONE, ONE[::-1].copy()), "two": TWO}
    assert_equals_keras(make, fitting(x, (Y, CLASS), batch_size=ROWS_AT_ONCE))


class OwnLoss(Nested):
    """Computes its loss itself, from everything that Keras hands it."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        assert training in (True, False)
        rows_ = ops.sum(ops.square(y[0] - y_pred[0]), axis=-1) + 0.1 * ops.sum(ops.abs(x["two"]), axis=-1)
        return ops.mean(rows_ * (1.0 if sample_weight is None else sample_weight[0]))


class MoreLoss(Nested):
    """Adds a mean over the rows to the loss of compile()."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        return loss + 0.2 * ops.mean(ops.square(y_pred[1]))


@pytest.mark.parametrize("kind", slow(MoreLoss, OwnLoss))
def test_overridden_compute_loss(kind):
    """A model's own loss, a mean over rows, is weighted by rows; Keras' part in it keeps its divisors."""

    def make():
        model = kind()
        model.compile(keras.optimizers.SGD(0.1), loss=["mse", CROSSENTROPY(from_logits=True)])
        return model

    x = {"pair": (ONE, ONE[::-1].copy()), "two": TWO}
    assert_equals_keras(make, fitting(x, (Y, CLASS), sample_weight=(WEIGHT, WEIGHT), batch_size=ROWS_AT_ONCE))


class TwoCalls(Nested):
    """Calls the loss of compile() on all positions and, with another weight and a mask, on the first of them."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        whole = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        first = [part[:, :1] for part in y_pred[:1]] + [y_pred[1]]
        mask = ops.cast(x["two"][:, 0] > 0, "float32")
        some = super().compute_loss(x=x, y=(y[0][:, :1], y[1]), y_pred=first, sample_weight=(None, mask), training=training)
        return whole + 0.5 * some


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [
        ("mean_with_sample_weight", (WEIGHT, WEIGHT)),
        *slow(
            *[("sum_over_batch_size", weights) for weights in (None, (WEIGHT, WEIGHT))],
            *[("sum", weights) for weights in (None, (WEIGHT, WEIGHT))],
            ("mean_with_sample_weight", None),
        ),
    ],
)
def test_several_calls_of_the_compiled_loss(weights, reduction):
    """Each is divided by what Keras divides that call by, whatever its positions, weights and masks."""

    def make():
        model = TwoCalls()
        losses = [keras.losses.MeanSquaredError(reduction=reduction), CROSSENTROPY(from_logits=True, reduction=reduction)]
        model.compile(keras.optimizers.SGD(0.01), loss=losses)
        return model

    x = {"pair": (ONE, ONE[::-1].copy()), "two": TWO}
    assert_equals_keras(make, fitting(x, (Y, CLASS), sample_weight=weights, batch_size=ROWS_AT_ONCE))


class OwnMetrics(Nested):
    """Follows a metric of its own, and logs a number that is no metric."""

    def __init__(self):
        super().__init__()
        self.spread = keras.metrics.Mean(name="spread")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.spread.update_state(ops.mean(ops.abs(y_pred[0]), axis=-1))
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"size": ops.mean(ops.square(y_pred[1]))}


def test_overridden_compute_metrics():
    """What it updates counts every row once, and a mean that it returns is weighted by rows."""

    def make():
        model = OwnMetrics()
        model.compile(keras.optimizers.SGD(0.1), loss=["mse", CROSSENTROPY(from_logits=True)], metrics=[["mae"], ["accuracy"]])
        return model

    x = {"pair": (ONE, ONE[::-1].copy()), "two": TWO}
    plain = assert_equals_keras(make, fitting(x, (Y, CLASS), batch_size=ROWS_AT_ONCE))
    assert {"spread", "size"} <= set(plain.logs)
