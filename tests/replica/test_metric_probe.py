"""Metrics of the user's own, whatever they keep and whoever feeds them; and how the growth of a mean's two sums is told."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

from own_metrics import Keeps
from sizes import BATCH, ROWS, mostly_slow
from trainings import assert_equals_keras, fitting, on, rows, run
from unisono._src.replica.fed_means import compute_sum_growth
from unisono._src.replica.growth import MEAN, SUM

X = rows(ROWS, 3)
POSITIVE = (np.arange(ROWS) % 16 > 12).astype("float32")[:, None]
"""The first batch has none."""


def f1_of_a_batch(old, y, p):
    p = ops.cast(p > 0.5, "float32")
    return old + 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p) + 1e-7)


def largest(old, y, p):
    return ops.maximum(old, ops.max(ops.abs(p)))


def made(metric, kernel="glorot_uniform"):
    def make():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(1, "sigmoid", kernel_initializer=kernel)])
        model.compile("sgd", "mse", metrics=[metric()])
        return model

    return make


def positives(old, y, p):
    return old + ops.sum(y)


def decaying(old, y, p):
    return 0.5 * old + ops.sum(y)


def last(old, y, p):
    return ops.mean(p)


KEPT = {
    "a sum": (positives, "glorot_uniform"),
    "a score of each batch": (f1_of_a_batch, "glorot_uniform"),
    "the largest of many": (largest, "glorot_uniform"),
    "the largest of what is one number": (largest, "zeros"),
    "a sum that decays": (decaying, "glorot_uniform"),
    "the last batch": (last, "glorot_uniform"),
}


@pytest.mark.parametrize("what", mostly_slow(KEPT, "a score of each batch", "the largest of many"))
def test_what_a_metric_keeps(what):
    """No row of the first batch is positive."""
    update, kernel = KEPT[what]
    assert_equals_keras(made(lambda: Keeps(update, "kept"), kernel), fitting(X, POSITIVE, batch_size=BATCH), replicas=(4,))


class Follows(keras.Model):
    """Follows what compute_loss makes, in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.seen = keras.metrics.Mean(name="seen")
        self.summed = keras.metrics.Sum(name="summed")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        self.seen.update_state(loss + (1.0 if training else 0.0))
        self.summed.update_state(ops.sum(ops.abs(y - y_pred)))
        return loss


def test_metrics_that_compute_loss_feeds():
    def make():
        model = Follows()
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    assert_equals_keras(make, fitting(X, POSITIVE, batch_size=BATCH, validation_data=(X[:11], POSITIVE[:11])), replicas=(4,))


class OwnTestStep(keras.Sequential):
    def test_step(self, state, data):
        weights, others, metrics = state
        x, y = data
        y_pred, others = self.stateless_call(weights, others, x, training=False)
        with keras.StatelessScope(list(zip(self.metrics_variables, metrics, strict=True))) as scope:
            logs = self.compute_metrics(x, y, y_pred, None)
            metrics = [scope.get_current_value(v) for v in self.metrics_variables]
        return logs, (weights, others, metrics)


def test_a_test_step_of_the_models_own_and_a_metric_of_the_users():
    def make():
        model = OwnTestStep([layers.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Keeps(positives, "positives")])
        return model

    models = [run(make, lambda model: None, strategy).model for strategy in (None, on(1, 4))]
    plain, ours = (model.evaluate(X, POSITIVE, BATCH, verbose=0, return_dict=True) for model in models)
    assert plain["positives"] == ours["positives"] == POSITIVE.sum()


class Coder(keras.Model):
    """As keras.io writes an autoencoder: without `call`, with a train_step and means of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers.Dense(2), layers.Dense(3)
        self.total, self.size = keras.metrics.Mean(name="total"), keras.metrics.Mean(name="size")
        self.encoder.build((None, 3))
        self.decoder.build((None, 2))
        self.built = True

    @property
    def metrics(self):
        return [self.total, self.size]

    def losses_of(self, weights, others, x):
        mapping = [*zip(self.trainable_variables, weights, strict=True), *zip(self.non_trainable_variables, others, strict=True)]
        with keras.StatelessScope(mapping):
            code = self.encoder(x)
            return ops.mean(ops.square(self.decoder(code) - x)), code

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        (x,) = data if isinstance(data, tuple) else (data,)
        (loss, code), gradients = jax.value_and_grad(self.losses_of, has_aux=True)(weights, others, x)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        total = self.total.stateless_update_state(metrics[:2], loss)
        size = self.size.stateless_update_state(metrics[2:], ops.mean(ops.abs(code)))
        logs = {"total": self.total.stateless_result(total), "size": self.size.stateless_result(size)}
        return logs, (weights, others, slots, [*total, *size])


def test_a_train_step_without_call_and_with_means_of_its_own():
    def make():
        model = Coder()
        model.compile(keras.optimizers.SGD(0.05))
        return model

    assert_equals_keras(make, fitting(X, batch_size=BATCH), replicas=(4,))


class FirstOfTies(keras.metrics.Mean):
    """What is true of the largest prediction of a row; of equal ones, a drawn one. Keras does not see the generator in a metric."""

    def __init__(self):
        super().__init__(name="first")
        self.seeds = keras.random.SeedGenerator(3)

    def update_state(self, y, p, sample_weight=None):
        drawn = keras.random.uniform(ops.shape(p), seed=self.seeds)
        best = ops.argmax(ops.where(p == ops.max(p, axis=1, keepdims=True), drawn, -1.0), axis=1)
        super().update_state(ops.take_along_axis(y, best[:, None], axis=1), sample_weight)


def test_a_metric_that_breaks_ties_by_random_numbers():
    """All predictions of the first batch are tied."""

    def make():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(3, kernel_initializer="zeros")])
        model.compile("sgd", "mse", metrics=[FirstOfTies()])
        return model

    x = X[:10]
    assert_equals_keras(make, fitting(x, x, batch_size=len(x), epochs=3), replicas=(4,))


def test_a_half_that_is_masked_is_no_part_of_a_sum():
    growth = lambda *numbers: compute_sum_growth(*map(np.float32, numbers))
    assert growth(1, 2, 3) == growth([1, 2], [3, -2], [4, 0]) == SUM
    assert growth(1, 2, 1.5) == growth([1, 2], [3, -2], [4, 1]) == MEAN
    assert (
        growth(0, 2, 2)
        is growth([1, 0], [3, 2], [4, 2])
        is growth(1, np.inf, np.inf)
        is compute_sum_growth(None, None, None)
        is None
    )
