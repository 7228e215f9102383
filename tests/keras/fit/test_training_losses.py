"""Every loss is that of plain Keras on the whole global batch, whoever computes it, and regularizers count once."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

from sizes import ROWS_AT_ONCE, mostly_slow, slow
from trainings import assert_equals_keras, crossentropy, fitting, labels, net, on, rows, run, tanh

X, Y, CLASS = rows(43, 5), rows(43, 3, seed=1), labels(43, 3)
SHARES = np.abs(Y) / np.abs(Y).sum(axis=1, keepdims=True)
WEIGHTS = np.where(np.arange(43) % 5, np.abs(rows(43, seed=2)), 0).astype("float32")
WORDS = np.where(np.arange(4) < np.arange(43)[:, None] % 5, np.arange(43 * 4).reshape(43, 4) % 11 + 1, 0)
"""Sentences of 0, 1, .. 4 words."""


def regressor(loss, last=None, **options):
    return net(tanh(7), lambda: layers.Dense(3, last), loss=loss, **options)


# What is compiled as a loss.


def scalar_loss(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def summed(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


def root(y_true, y_pred):
    return ops.sqrt(summed(y_true, y_pred))


class OwnLoss(losses.Loss):
    def call(self, y_true, y_pred):
        return ops.sum(ops.power(ops.abs(y_true - y_pred), 1.5), axis=-1)


class OwnCall(losses.Loss):
    """Does everything itself."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.abs(y_true - y_pred))


class Reduced(losses.Loss):
    """Reduces by itself, and needs no reduction."""

    def __init__(self):
        super().__init__(reduction=None)

    def call(self, y_true, y_pred):
        return scalar_loss(y_true, y_pred)


def squeezed(y_true, y_pred):
    """Of one row it is a number."""
    return ops.square(ops.squeeze(y_true) - ops.squeeze(y_pred))


LOSSES = {
    "a function by name": ("mae", Y, None),
    "Huber": (losses.Huber, Y, None),
    "cosine similarity": (losses.CosineSimilarity, Y, None),
    "focal": (losses.BinaryFocalCrossentropy, (Y > 0).astype("float32"), "sigmoid"),
    "smoothed labels": (losses.CategoricalCrossentropy(label_smoothing=0.1), SHARES, "softmax"),
    "Kullback-Leibler": (losses.KLDivergence, SHARES, "softmax"),
    "ignored class": (losses.SparseCategoricalCrossentropy(ignore_class=1), CLASS, "softmax"),
    "Tversky": (losses.Tversky, (Y > 0).astype("float32"), "sigmoid"),
    "a number for a batch": (scalar_loss, Y, None),
    "a sum for a batch": (summed, Y, None),
    "the root of a sum": (root, Y, None),
    "a loss class": (OwnLoss, Y, None),
    "a loss class with its own __call__": (OwnCall, Y, None),
    "a loss that reduces by itself": (Reduced, Y, None),
    "squeezed": (squeezed, Y, None),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", mostly_slow(LOSSES, "ignored class", "a loss class with its own __call__", "the root of a sum"))
def test_loss_equals_keras(name):
    """Over ragged batches, some replicas without rows."""
    loss, y, last = LOSSES[name]
    make = regressor(loss, last, optimizer=lambda: keras.optimizers.SGD(0.01 if "sum" in name else 0.1))
    assert_equals_keras(make, fitting(X, y, batch_size=ROWS_AT_ONCE), devices=(3,))


def test_reduction_none_is_refused():
    """fit needs one number; the error says what to write."""
    with pytest.raises(ValueError, match=r"has reduction='none'.*Write reduction='sum_over_batch_size'"):
        run(regressor(losses.MeanSquaredError(reduction="none")), fitting(X, Y, batch_size=ROWS_AT_ONCE), on(3))


# Weights and masks.


class OneNumber(losses.Loss):
    """Keras multiplies the number by each weight."""

    def call(self, y_true, y_pred):
        return scalar_loss(y_true, y_pred)


def of_words(reduction):
    embedding = lambda: layers.Embedding(12, 4, mask_zero=True)
    return net(embedding, 3, loss=crossentropy(reduction=reduction), weighted_metrics=["accuracy"])


REDUCTIONS = ("mean_with_sample_weight", "sum", "mean", "sum_over_batch_size")
FIRST_WITHOUT = np.where(np.arange(43) < 20, 0, WEIGHTS)
WEIGHTED = {
    **{
        f"rows, {reduction}": (
            regressor(losses.MeanSquaredError(reduction=reduction), weighted_metrics=["mae"]), X, Y, {"sample_weight": WEIGHTS}
        )
        for reduction in REDUCTIONS
    },
    **{
        f"a number, {reduction}": (regressor(OneNumber(reduction=reduction)), X, Y, {"sample_weight": WEIGHTS})
        for reduction in REDUCTIONS
    },
    **{
        f"positions, {reduction}": (of_words(reduction), WORDS, labels(43, 3, 4), {"sample_weight": np.abs(rows(43, 4, seed=2))})
        for reduction in REDUCTIONS
    },
    "classes": (regressor(crossentropy(), metrics=["accuracy"]), X, CLASS, {"class_weight": {0: 0.5, 1: 2.0, 2: 0.0}}),
    "batches without any": (
        regressor(losses.MeanSquaredError(reduction="mean_with_sample_weight")), X, Y, {"sample_weight": FIRST_WITHOUT}
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        WEIGHTED,
        "rows, mean_with_sample_weight",
        "a number, mean_with_sample_weight",
        "positions, sum_over_batch_size",
        "classes",
    ),
)
def test_weights_and_masks_are_those_of_keras(name):
    """Each reduction divides by what Keras divides by on the whole batch; a replica whose rows are all masked adds nothing."""
    make, x, y, weights = WEIGHTED[name]
    batch_size = 10 if name.startswith("rows") else ROWS_AT_ONCE  # replicas of two rows, and of one
    assert_equals_keras(make, fitting(x, y, batch_size=batch_size, **weights))


# What layers and models add, and losses that a model computes.


class Adds(layers.Layer):
    """Adds a sum and a mean over its rows, and one number that no row enters."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], regularizer="l2", initializer="ones")

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x * self.scale)))
        self.add_loss(0.3 * ops.mean(ops.square(x * self.scale)))
        self.add_loss(0.1 * ops.sum(ops.square(self.scale)))
        return x * self.scale


class AddsLater(layers.Layer):
    """Adds a sum over its rows from the third step on, whatever rows and weights are."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=shape[1:], initializer="ones")
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.steps.assign(self.steps + 1)
        self.add_loss(ops.where(self.steps > 2, 0.01 * ops.sum(x * self.kernel), 0.0))
        return x


class AddsLargest(layers.Layer):
    """Adds a number that is almost the same for all rows, though its gradient is that of one row alone."""

    def call(self, x):
        self.add_loss(ops.max(ops.tanh(6 + ops.sum(ops.square(x), axis=-1))))
        return x


class Roots(keras.Sequential):
    """Computes the root of a sum."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return root(y, y_pred)


class Hands(keras.Sequential):
    """Hands on what compile() has been given."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 2 * super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def reused(layer, last=3, **options):
    """A layer that is called twice, behind each other."""

    def make():
        inputs, shared = keras.Input((5,)), layer()
        model = keras.Model(inputs, layers.Dense(last, **options)(shared(shared(inputs))))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    return make


BOTH = {"kernel_regularizer": keras.regularizers.L1L2(0.02, 0.01), "bias_regularizer": "l2"}
SLOWLY = {"optimizer": lambda: keras.optimizers.SGD(0.01)}
ADDED = {
    "add_loss": net(tanh(5), Adds, 3),
    "add_loss in a layer that is used twice": reused(Adds),
    "add_loss from the third step on": net(tanh(5), AddsLater, 3),
    "add_loss of the largest": net(tanh(5), AddsLargest, 3),
    "regularizers of a layer that is used twice": reused(tanh(5, **BOTH), kernel_regularizer="l1"),
    "a regularizer of what a layer gives": net(tanh(7, activity_regularizer=keras.regularizers.L2(0.01)), 3),
    "compute_loss that takes a root": net(tanh(5), 3, kind=Roots),
    "compute_loss of a compiled sum": net(tanh(5), 3, kind=Hands, loss=summed, **SLOWLY),
    "compute_loss of a reduction": net(tanh(5), 3, kind=Hands, loss=losses.MeanSquaredError(reduction="sum"), **SLOWLY),
    "a sum where layers draw": net(tanh(5), lambda: layers.Dropout(0.3), 3, loss=summed, **SLOWLY),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ADDED, "add_loss from the third step on", "a regularizer of what a layer gives", "compute_loss that takes a root",
        "a sum where layers draw",
    ),
)  # fmt: skip
def test_what_is_added_or_computed_is_that_of_keras(name):
    """Over ragged batches, with validation."""
    assert_equals_keras(ADDED[name], fitting(X, Y, batch_size=ROWS_AT_ONCE, validation_data=(X[:11], Y[:11])))


@pytest.mark.parametrize("devices", [1, *slow(3)])
def test_a_loss_that_comes_later_has_the_same_bits_however_many_batches_a_call_takes(devices):
    make = lambda steps: net(tanh(5), AddsLater, 3, steps_per_execution=steps)
    fit = fitting(X[:32], Y[:32], batch_size=8)
    assert run(make(4), fit, on(devices, 4)).bits == run(make(1), fit, on(1, 4)).bits


def test_a_model_without_targets():
    """fit, evaluate and predict of a model whose only loss is add_loss."""
    models = []

    def fit(model):
        models.append(model)
        return fitting(X, batch_size=ROWS_AT_ONCE)(model)

    assert_equals_keras(net(4, Adds, loss=None), fit)
    plain, *_, ours = models
    options = {"batch_size": ROWS_AT_ONCE, "verbose": 0}
    np.testing.assert_allclose(ours.evaluate(X, **options), plain.evaluate(X, **options), rtol=1e-5)
    np.testing.assert_allclose(ours.predict(X, **options), plain.predict(X, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_a_loss_of_an_earlier_trace_takes_no_loss_away(first):
    """Keras' layers know their losses by id(). Here two layers add the same object in turns, one trace the one, the next the
    other: what Python does when it hands out an address again."""
    seven, turns = ops.convert_to_tensor(7.0), itertools.cycle([first, not first])
    turn = None

    class AddsInTurn(layers.Layer):
        def __init__(self, begins):
            super().__init__()
            self.begins = begins

        def call(self, x):
            nonlocal turn
            if self.begins:
                turn = next(turns)
            if turn is self.begins:
                self.add_loss(seven)
            return x

    make = net(lambda: AddsInTurn(True), 3, lambda: AddsInTurn(False), metrics=["mse"])
    model = run(make, lambda model: model, on(1, 2)).model
    for batch_size in (43, 10, 9):
        log = fitting(X, Y, batch_size=batch_size, validation_data=(X, Y))(model).history
        assert np.isclose(log["loss"][0] - log["mse"][0], 7)
        assert np.isclose(log["val_loss"][0] - log["val_mse"][0], 7)
