"""What replica code makes of rows together where a first batch does not show it: marked rows, metrics that are fed with numbers, gradients that
are changed by hand."""

from __future__ import annotations

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from sizes import mostly_slow, slow
from trainings import on, rows

R = 4
X = rows(32, 4)
LABELS = np.random.default_rng(0).integers(0, 2, 32).astype("int32")
LABELS[17::3] = -1
"""Rows of the second batch alone are marked."""


class Steps:
    """A step of a loop, by a function of the labels and the predictions, or of the gradients."""

    def __init__(self, loss=None, change=lambda gradients: gradients, feed=None, metric=None):
        keras.utils.set_random_seed(0)
        self.strategy, self.loss, self.change, self.feed = on(1, R), loss, change, feed
        with self.strategy.scope():
            self.model = keras.Sequential([layers.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2)])
            self.optimizer = keras.optimizers.SGD(0.01)
            self.metric = metric() if metric else None
        if loss is None:
            self.loss = lambda y, p: squares(p)

    def replica(self, batch):
        x, y = batch
        variables = self.model.trainable_variables
        _, gradients = un.value_and_grad(lambda: self.loss(y, self.model(x, training=True)), variables)
        self.optimizer.apply(self.change(gradients), variables)
        if self.feed is not None:
            self.metric.update_state(self.feed(squares(x)))

    def said(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in self.strategy.distribute_dataset((X, LABELS), batch_size=16):
                self.strategy.run(self.replica, args=(batch,))
        return [str(warning.message) for warning in caught]


def squares(p):
    return ops.sum(ops.square(p), axis=-1)


def counted(y):
    return ops.cast(y >= 0, "float32")


def entropy(y, p):
    return keras.losses.sparse_categorical_crossentropy(ops.maximum(y, 0), p, from_logits=True)


BY_MARKS = {
    "a mean of what counts": lambda y, p: ops.sum(counted(y) * entropy(y, p)) / ops.sum(counted(y)) / R,
    "values by the mean of what counts": lambda y, p: counted(y) * entropy(y, p) / ops.mean(counted(y)),
    "values by how many count": lambda y, p: counted(y) * squares(p) / ops.sum(counted(y)),
}


@pytest.mark.parametrize("how", mostly_slow(BY_MARKS, "a mean of what counts", "values by how many count"))
def test_rows_that_do_not_count_are_found_before_any_is_met(how):
    (word,) = Steps(BY_MARKS[how]).said()
    assert "makes of all rows together what is not made of their parts" in word


APART = {
    "a sum of what counts": lambda y, p: ops.sum(counted(y) * entropy(y, p)) / 16,
    "values of what counts": lambda y, p: counted(y) * entropy(y, p),
    "values and weights": lambda y, p: (entropy(y, p), counted(y)),
}


@pytest.mark.parametrize("how", [*slow("a sum of what counts", "values of what counts"), "values and weights"])
def test_marks_by_themselves_are_no_fault(how):
    assert Steps(APART[how]).said() == []


def norm(gradients):
    return ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in gradients))


CHANGED = {
    "clipped": lambda gradients: [ops.clip(gradient, -0.01, 0.01) for gradient in gradients],
    "clipped by their norm": lambda gradients: [g / ops.maximum(1.0, 100 * norm(gradients)) for g in gradients],
    "of length one": lambda gradients: [gradient / norm(gradients) for gradient in gradients],
    "their signs": lambda gradients: [ops.sign(gradient) for gradient in gradients],
}


@pytest.mark.parametrize("how", [*slow("clipped", "of length one", "their signs"), "clipped by their norm"])
def test_what_is_no_sum_of_gradients_is_said(how):
    (word,) = Steps(change=CHANGED[how]).said()
    assert word.startswith("The function 'replica' applies gradients that it has made or changed by itself")


LINEAR = {
    "halved": lambda gradients: [gradient / 2 for gradient in gradients],
    "masked": lambda gradients: [gradient * np.float32(0.0) for gradient in gradients[:1]] + gradients[1:],
    "with a constant, over the replicas": lambda gradients: [g + ops.full(g.shape, 0.01) / R for g in gradients],
    "a mean, over the replicas": lambda gradients: [gradient * 4 / R for gradient in gradients],
}


def test_a_part_that_does_not_depend_on_the_rows_is_said():
    (word,) = Steps(change=lambda gradients: [gradient + 0.01 for gradient in gradients]).said()
    assert "is added in each of 4 replicas, and counts 4 times" in word


class ByJax(Steps):
    """Differentiates a mean by JAX alone."""

    divisor = 1

    def replica(self, batch):
        x, _ = batch
        variables = self.model.trainable_variables

        def loss_of(values):
            with keras.StatelessScope(list(zip(variables, values, strict=True))):
                return ops.mean(squares(self.model(x))) / self.divisor

        self.optimizer.apply(jax.grad(loss_of)([v.value for v in variables]), variables)


@pytest.mark.parametrize(("divisor", "times"), [(1, 1), *slow((R, 0))])
def test_a_mean_that_jax_differentiates_is_said(divisor, times):
    steps = ByJax()
    steps.divisor = divisor
    assert ["4 times the mean over the global batch" in word for word in steps.said()] == [True] * times


@pytest.mark.parametrize("how", mostly_slow(LINEAR, "masked", "with a constant, over the replicas"))
def test_what_adds_up_is_not(how):
    assert Steps(change=LINEAR[how]).said() == []


def test_statistics_of_a_batch_are_no_change_of_gradients():
    """Layers see their replica's rows, which is nobody's fault."""
    steps = Steps(change=LINEAR["halved"])
    with steps.strategy.scope():
        steps.model = keras.Sequential([layers.Input((4,)), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(2)])
    assert steps.said() == []


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros")

    def update_state(self, value):
        self.value.assign(ops.maximum(self.value, value))

    def result(self):
        return self.value


FED = {
    "a mean with the largest": (keras.metrics.Mean, ops.max, np.max),
    "a sum with the root of a mean": (keras.metrics.Sum, lambda v: ops.sqrt(ops.mean(v)), lambda v: np.sqrt(np.mean(v))),
    "a mean with a mean": (keras.metrics.Mean, ops.mean, np.mean),
    "a sum with a sum": (keras.metrics.Sum, ops.sum, np.sum),
    "one that keeps the largest": (Largest, ops.max, np.max),
}


@pytest.mark.parametrize("how", mostly_slow(FED, "a sum with the root of a mean", "one that keeps the largest"))
def test_a_metric_that_is_fed_with_a_number_has_that_of_all_rows(how):
    metric, feed, of_all = FED[how]
    steps = Steps(feed=feed, metric=metric)
    assert steps.said() == []
    values = np.sum(np.square(X), axis=-1)
    by_batch = [of_all(values[:16]), of_all(values[16:])]
    merge = {keras.metrics.Mean: np.mean, keras.metrics.Sum: np.sum, Largest: np.max}[metric]
    np.testing.assert_allclose(steps.metric.result(), merge(by_batch), rtol=1e-5)
