"""Logs of a step that are not simply the results of the metrics: those of plain Keras, for every R and placement."""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from sizes import cases, mostly_slow, slow
from trainings import assert_close_logs, assert_equals_keras, fitting, labels, on, rows, run

X, Y = rows(40, 5), labels(40, 2)
BATCH, HELD_OUT = cases((20, 20), (16, 24))
"""In `make test` all batches have as many rows."""
FIT = fitting(X, Y, batch_size=BATCH, epochs=2, validation_data=(X[:HELD_OUT], Y[:HELD_OUT]))


class Net(keras.Model):
    """A binary classifier."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(1, "sigmoid")

    def call(self, x):
        return ops.squeeze(self.out(x), -1)


class OwnLoss(Net):
    """Its steps return numbers of their own, one with the name of a metric that they do not feed."""

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y = data

        def compute_loss(weights):
            y_pred, _ = self.stateless_call(weights, others, x)
            return ops.mean(ops.square(ops.cast(y, "float32") - y_pred))

        loss, gradients = jax.value_and_grad(compute_loss)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"loss": loss, "twice": 2 * loss}, (weights, others, slots, metrics)

    def test_step(self, state, data):
        x, y = data
        y_pred, _ = self.stateless_call(*state[:2], x)
        error = ops.cast(y, "float32") - y_pred
        return {"loss": ops.mean(ops.square(error)), "bias": ops.mean(error)}, state


class OtherName(OwnLoss):
    """What it logs is not the name of a metric."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {"my_loss": logs["loss"]}, state


class FromResults(Net):
    """Its logs are results of the metrics, and what is computed from them."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        both = logs["precision"] + logs["recall"]
        return logs | {"f1": 2 * logs["precision"] * logs["recall"] / both, "perplexity": ops.exp(logs["loss"])}


class SomeResults(Net):
    """It logs some results of the metrics, and a number of rows."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {"recall": logs["recall"], "size": ops.mean(ops.abs(y_pred))}


class FromStep(Net):
    """It adds to the logs of Keras' step, in a jitted function."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return logs | {"perplexity": jax.jit(lambda loss: ops.exp(loss) + 1)(logs["loss"])}, state


class OwnValue(Net):
    """It logs a number of the batch under the name of a result, beside results."""

    def train_step(self, state, data):
        x, y = data
        y_pred, _ = self.stateless_call(*state[:2], x)
        logs, state = super().train_step(state, data)
        return logs | {"loss": ops.mean(ops.square(ops.cast(y, "float32") - y_pred))}, state


class OwnMetric(Net):
    """Its compute_metrics logs a number of the batch under the name of a result."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"recall": ops.mean(y_pred)}


class NoLogs(Net):
    """It logs nothing."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        super().compute_metrics(x, y, y_pred, sample_weight)
        return {}


MODELS = [OwnLoss, OtherName, FromResults, SomeResults, FromStep, NoLogs]


def make(model_class, **options):
    model = model_class()
    model(X[:1])
    metrics = [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")]
    model.compile(keras.optimizers.SGD(0.01), "binary_crossentropy", metrics=metrics, **options)
    return model


@pytest.mark.parametrize("model_class", mostly_slow(MODELS, OwnLoss, FromStep, NoLogs))
def test_logs_are_those_of_keras(model_class):
    """In training and in validation, of steps that are compiled together."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = assert_equals_keras(lambda: make(model_class), FIT, replicas=cases((4,), (1, 4)), devices=cases((2,), (1, 2)))
    assert all(np.isfinite(values).all() for values in plain.logs.values())


class BatchLogs(keras.callbacks.Callback):
    """Keeps the logs of each batch."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))

    on_test_batch_end = on_train_batch_end


@pytest.mark.parametrize("model_class", [OwnValue, *slow(OwnMetric, FromStep, Net)])
def test_callbacks_see_the_numbers_of_each_batch_and_running_results(model_class):
    """Keras ends the epoch with the results of the metrics, where the logs have their names."""

    def list_logs(strategy):
        seen = BatchLogs()
        fit = fitting(X, Y, batch_size=BATCH, validation_data=(X[:HELD_OUT], Y[:HELD_OUT]), callbacks=[seen])
        return [run(lambda: make(model_class), fit, strategy).logs, *seen.logs]

    plain, *ours = map(list_logs, cases((None, on(2, 4)), (None, on(1, 1), on(2, 4))))
    for logs in ours:
        assert len(logs) == len(plain) == cases(4, 6)
        for one, of_keras in zip(logs, plain, strict=True):
            assert_close_logs(one, of_keras)


def test_callbacks_follow_a_loss_of_the_steps_own():
    """A tracker that is not fed is no loss of zero: training would stop."""
    with un.MirroredStrategy(replicas=4).scope():
        model = make(OwnLoss)
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1)
    history = model.fit(X, Y, batch_size=8, epochs=4, verbose=0, validation_data=(X, Y), callbacks=[stop]).history
    assert len(history["val_loss"]) == 4
    assert min(history["val_loss"]) > 0.05
