"""Every loss has the divisor that Keras gives it on the whole global batch, and regularizers count once."""

import itertools
import warnings

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

from sizes import ROWS_AT_ONCE, cases, mostly_slow, slow
from trainings import assert_equals_keras, assert_same_bits, fitting, labels, on, rows, run

X, Y = rows(43, 5), rows(43, 3, seed=1)
SHARES = np.abs(Y) / np.abs(Y).sum(axis=1, keepdims=True)
WEIGHTS = np.where(np.arange(43) % 5, np.abs(rows(43, seed=2)), 0).astype("float32")


def regressor(loss, last="linear", **options):
    def make():
        model = keras.Sequential([layers.Dense(7, "tanh"), layers.Dense(3, last)])
        model.compile(keras.optimizers.SGD(0.1), loss() if isinstance(loss, type) else loss, **options)
        return model

    return make


def scalar_loss(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


class OwnLoss(losses.Loss):
    def call(self, y_true, y_pred):
        return ops.sum(ops.power(ops.abs(y_true - y_pred), 1.5), axis=-1)


class OwnCall(losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.abs(y_true - y_pred))


LOSSES = {
    "a function by name": ("mae", Y, "linear"),
    "Huber": (losses.Huber, Y, "linear"),
    "cosine similarity": (losses.CosineSimilarity, Y, "linear"),
    "focal": (losses.BinaryFocalCrossentropy, (Y > 0).astype("float32"), "sigmoid"),
    "smoothed labels": (losses.CategoricalCrossentropy(label_smoothing=0.1), SHARES, "softmax"),
    "Kullback-Leibler": (losses.KLDivergence, SHARES, "softmax"),
    "ignored class": (losses.SparseCategoricalCrossentropy(ignore_class=1), labels(43, 3), "softmax"),
    "one number for a batch": (scalar_loss, Y, "linear"),
    "a loss class": (OwnLoss, Y, "linear"),
    "a loss class with its own __call__": (OwnCall, Y, "linear"),
}


COMMON = ("ignored class", "a loss class with its own __call__")


@pytest.mark.parametrize("name", mostly_slow(LOSSES, *COMMON))
def test_loss_equals_keras(name):
    """Ragged batches of this loss, some replicas without rows, equal plain Keras."""
    loss, y, last = LOSSES[name]
    assert_equals_keras(regressor(loss, last), fitting(X, y, batch_size=ROWS_AT_ONCE), devices=(3,))


@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", *slow("sum", "mean", "sum_over_batch_size")])
def test_reductions_of_weighted_rows(reduction):
    """Each reduction divides by what Keras divides by on the whole batch, zero weights included."""
    make = regressor(losses.MeanSquaredError(reduction=reduction), weighted_metrics=["mae"])
    assert_equals_keras(make, fitting(X, Y, sample_weight=WEIGHTS, batch_size=10))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", *slow("sum", "mean_with_sample_weight")])
def test_reductions_under_a_mask_and_weights_of_positions(reduction):
    """Masked positions count in no divisor; a replica whose rows are all masked adds nothing."""
    words = np.arange(43 * 4).reshape(43, 4) % 11 + 1
    words[np.arange(4) >= np.arange(43)[:, None] % 5] = 0  # rows of 0, 1, .. 4 words

    def make():
        model = keras.Sequential([layers.Embedding(12, 4, mask_zero=True), layers.Dense(3)])
        loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        model.compile(keras.optimizers.SGD(0.1), loss, weighted_metrics=["accuracy"])
        return model

    weights = np.abs(rows(43, 4, seed=2))
    assert_equals_keras(make, fitting(words, labels(43, 3, 4), sample_weight=weights, batch_size=ROWS_AT_ONCE))


def test_reduction_none_is_refused():
    """fit needs one number; the error says what to write."""
    with pytest.raises(ValueError, match=r"has reduction='none'.*Write reduction='sum_over_batch_size'"):
        run(regressor(losses.MeanSquaredError(reduction="none")), fitting(X, Y, batch_size=ROWS_AT_ONCE), on(3))


@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", *slow("sum_over_batch_size", "sum")])
def test_weights_on_a_loss_of_one_number(reduction):
    """Keras multiplies the number by each weight."""

    class OneNumber(losses.Loss):
        def call(self, y_true, y_pred):
            return scalar_loss(y_true, y_pred)

    fit = fitting(X, Y, sample_weight=WEIGHTS, batch_size=ROWS_AT_ONCE)
    assert_equals_keras(regressor(OneNumber(reduction=reduction)), fit, replicas=cases((8,), (1, 8)))


def test_class_weights():
    """Class weights are sample weights looked up by label."""

    def make():
        model = keras.Sequential([layers.Dense(7, "tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model

    assert_equals_keras(make, fitting(X, labels(43, 3), class_weight={0: 0.5, 1: 2.0, 2: 0.0}, batch_size=ROWS_AT_ONCE))


@pytest.mark.slow
def test_a_batch_whose_weights_are_all_zero():
    """Nothing is divided by zero: the weights stay, the loss is zero."""
    make = regressor(losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    assert_equals_keras(make, fitting(X, Y, sample_weight=np.where(np.arange(43) < 20, 0, WEIGHTS), batch_size=ROWS_AT_ONCE))


def distances(y_true, y_pred):
    """One value for a pair of rows."""
    pairs = ops.reshape(y_pred, (-1, 2, 3))
    return ops.sum(ops.square(pairs[:, 0] - pairs[:, 1]), axis=-1)


def distance_of_pairs(y_true, y_pred):
    return ops.mean(distances(y_true, y_pred))


@pytest.mark.parametrize(
    ("loss", "replicas"), [(distances, 4), *slow((distances, 1), (distance_of_pairs, 4), (distance_of_pairs, 1))]
)
def test_rows_in_pairs(loss, replicas):
    """A loss and a metric of pairs of neighbouring rows, where every replica has whole pairs."""
    make = regressor(loss, metrics=[distances])
    assert_equals_keras(make, fitting(X[:16], Y[:16], batch_size=8), replicas=(replicas,))


def test_pairs_that_replicas_tear_apart_are_those_of_the_batch():
    """Three rows are no pairs."""
    assert_equals_keras(regressor(distances), fitting(X[:12], Y[:12], batch_size=6), replicas=(4,))


def contrasted(y_true, y_pred):
    """Each row against all others."""
    likeness = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.logsumexp(likeness, axis=-1) - ops.diagonal(likeness)


def of_halves(y_true, y_pred):
    """Row i beside row i + n / 2."""
    half = ops.shape(y_pred)[0] // 2
    return ops.sum(ops.square(y_pred[:half] - y_pred[half:]), axis=-1)


def root_of_mean(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def by_largest(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred), axis=-1) / ops.max(ops.abs(y_pred))


def of_hard_rows(y_true, y_pred):
    """Of the rows whose loss is above the mean."""
    each = ops.sum(ops.square(y_true - y_pred), axis=-1)
    return each * ops.cast(each > ops.mean(each), each.dtype)


class Balanced(losses.Loss):
    """Does everything itself, and weighs by how frequent ones are in the batch."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(y_true - y_pred)) / (ops.mean(ops.cast(y_true > 0, "float32")) + 0.1)


COUPLING = {
    "contrasted": contrasted,
    "halves": of_halves,
    "root": root_of_mean,
    "by the largest": by_largest,
    "hard rows": of_hard_rows,
    "balanced": Balanced(),
    "Dice": losses.Dice(),
    "Tversky": losses.Tversky(),
    "Circle": losses.Circle(),
}


@pytest.mark.parametrize("name", mostly_slow(COUPLING, "contrasted", "hard rows"))
def test_a_loss_that_looks_at_the_whole_batch(name):
    """A batch of ten rows for four replicas, and one of six."""
    y = labels(16, 3) if name == "Circle" else (Y[:16] > 0).astype("float32")
    assert_equals_keras(regressor(COUPLING[name], "sigmoid"), fitting(X[:16], y, batch_size=10), replicas=(4,))


class Pairs(keras.Model):
    """Each row's item beside those of the others, as with negatives from the batch."""

    def __init__(self, columns=None):
        super().__init__()
        self.one, self.other = layers.Dense(4), layers.Dense(4)
        self.columns = columns

    def call(self, x):
        pairs = ops.matmul(self.one(x), ops.transpose(self.other(x)))
        return pairs if self.columns is None else ops.sum(pairs, axis=1, keepdims=True) + ops.zeros((1, self.columns))


@pytest.mark.parametrize("columns", [None, *slow(3)])
def test_outputs_for_all_pairs_of_rows(columns):
    """Also where an axis is as long as a replica's rows by chance."""

    def make():
        model = Pairs(columns)
        model.compile(keras.optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    assert_equals_keras(make, fitting(X[:10], np.arange(10) % (columns or 10), batch_size=10), replicas=(4,))


def squeezed(y_true, y_pred):
    """Of one row it is a number."""
    return ops.square(ops.squeeze(y_true) - ops.squeeze(y_pred))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "weighted"), [(5, True), *slow((13, False), (5, False), (13, True))])
def test_a_loss_that_squeezes_the_axis_of_one_row(count, weighted):
    """Beside replicas of two rows and of none."""

    def make():
        model = keras.Sequential([layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), squeezed, metrics=[squeezed])
        return model

    x, y = X[:count], Y[:count, :1]
    weights = {"sample_weight": WEIGHTS[:count]} if weighted else {}
    assert_equals_keras(make, fitting(x, y, batch_size=8, epochs=2, **weights), replicas=(1, 4))


class Reduced(losses.Loss):
    """Reduces by itself."""

    def __init__(self):
        super().__init__(reduction=None)

    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred))


def test_a_loss_that_reduces_by_itself_needs_no_reduction():
    assert_equals_keras(regressor(Reduced), fitting(X[:40], Y[:40], batch_size=8), replicas=cases((4,), (1, 4)))


@pytest.mark.slow
def test_a_model_without_weights_to_train():
    def make():
        model = keras.Sequential([layers.BatchNormalization(center=False, scale=False), layers.Dense(3, trainable=False)])
        model.compile("sgd", scalar_loss)
        return model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The model does not have any trainable weights")
        assert_equals_keras(make, fitting(X[:40], Y[:40], batch_size=8), replicas=(1,))
        assert_same_bits(make, fitting(X[:40], Y[:40], batch_size=8), replicas=4)


def test_regularizers_count_once():
    """The only gradient is a regularizer's, 2 from 1.0: a step of rate 1 lands on -1.0, whatever R."""

    class Scale(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(1,), initializer="ones", regularizer=keras.regularizers.L2(1.0))

        def call(self, x):
            return x * self.scale

    def make():
        model = keras.Sequential([keras.Input((5,)), Scale()])
        model.compile(keras.optimizers.SGD(1.0))
        return model

    for strategy in cases((None, on(3)), (None, on(1, 1), on(1), on(3), on(4, 6))):
        found = run(make, fitting(X[:10], batch_size=10), strategy)
        assert np.asarray(found.model.trainable_variables[0].value).tolist() == [-1.0]
        assert found.logs["loss"] == [1.0]


@pytest.mark.slow
def test_l1_l2_and_bias_regularizers():
    """Regularizers of all kinds of weights, reused layers included, equal plain Keras."""

    def make():
        inputs, shared = (
            keras.Input((5,)),
            layers.Dense(5, "tanh", kernel_regularizer=keras.regularizers.L1L2(0.02, 0.01), bias_regularizer="l2"),
        )
        model = keras.Model(inputs, layers.Dense(3, kernel_regularizer="l1")(shared(shared(inputs))))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_equals_keras(make, fitting(X, Y, batch_size=ROWS_AT_ONCE))


class MeanActivity(layers.Layer):
    """Adds two losses: a mean over its rows, and one that no row enters."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        self.add_loss(0.3 * ops.mean(ops.square(x * self.scale)))
        self.add_loss(0.1 * ops.sum(ops.square(self.scale)))
        return x * self.scale


@pytest.mark.slow
def test_add_loss_in_a_reused_layer():
    """Means over a replica's rows are weighted by rows, and add up to plain Keras' loss."""

    def make():
        inputs, activity = keras.Input((5,)), MeanActivity()
        model = keras.Model(inputs, layers.Dense(3)(activity(activity(inputs))))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_equals_keras(make, fitting(X, Y, batch_size=ROWS_AT_ONCE, validation_data=(X[:7], Y[:7])))


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_a_loss_of_an_earlier_trace_takes_no_loss_away(first):
    """Keras' layers know their losses by id(). Here two layers add the same object in turns, one trace the one, the next the
    other: what Python does when it hands out an address again."""
    seven, turns = ops.convert_to_tensor(7.0), itertools.cycle([first, not first])
    turn = None

    class Adds(layers.Layer):
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

    with on(1, replicas=2).scope():
        model = keras.Sequential([layers.Input((5,)), Adds(True), layers.Dense(3), Adds(False)])
    model.compile("sgd", "mse", metrics=["mse"])
    logs = [
        model.fit(X, Y, batch_size=batch_size, verbose=0, validation_data=(X, Y), shuffle=False).history
        for batch_size in (43, 10, 9)
    ]
    for log in logs:
        assert np.isclose(log["loss"][0] - log["mse"][0], 7)
        assert np.isclose(log["val_loss"][0] - log["val_mse"][0], 7)


def test_a_model_without_targets():
    """fit, evaluate and predict of a model whose only loss is add_loss."""

    def make():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4), MeanActivity()])
        model.compile(keras.optimizers.SGD(0.1))
        return model

    models = []

    def fit(model):
        models.append(model)
        return fitting(X, batch_size=ROWS_AT_ONCE)(model)

    assert_equals_keras(make, fit)
    plain, *_, ours = models
    np.testing.assert_allclose(
        ours.evaluate(X, batch_size=ROWS_AT_ONCE, verbose=0), plain.evaluate(X, batch_size=ROWS_AT_ONCE, verbose=0), rtol=1e-5
    )
    outputs = [model.predict(X, batch_size=ROWS_AT_ONCE, verbose=0) for model in (ours, plain)]
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)


def test_activity_regularizers():
    """A regularizer of a layer's output, which Keras adds up over the rows of the batch, equals plain Keras."""

    def make():
        model = keras.Sequential([layers.Dense(7, "tanh", activity_regularizer=keras.regularizers.L2(0.01)), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_equals_keras(make, fitting(X, Y, batch_size=ROWS_AT_ONCE))
