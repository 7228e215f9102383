"""Metrics of an epoch are those of its real rows, each counted once, whatever the replicas and batches."""

from functools import partial

import keras
import numpy as np
import pytest
from keras import layers, metrics, ops

from sizes import ROWS_AT_ONCE, cases, slow
from trainings import assert_equals_keras, assert_same_bits, fitting, labels, on, rows, run

X, BINARY, CLASS = rows(43, 5), (rows(43, 1, seed=4) > 0).astype("float32"), labels(43, 3)
WEIGHT = np.abs(rows(43, seed=5))
BINARY_METRICS = [
    metrics.BinaryAccuracy, metrics.BinaryCrossentropy, metrics.Precision, metrics.Recall, metrics.AUC,
    metrics.TruePositives, metrics.FalseNegatives, metrics.MeanSquaredError, metrics.RootMeanSquaredError,
    partial(metrics.SensitivityAtSpecificity, 0.5), partial(metrics.SpecificityAtSensitivity, 0.5),
    partial(metrics.PrecisionAtRecall, 0.5), partial(metrics.AUC, curve="PR"), metrics.Hinge,
    partial(metrics.F1Score, threshold=0.5), partial(metrics.BinaryIoU, threshold=0.5), metrics.R2Score,
]  # fmt: skip
CLASS_METRICS = [
    "accuracy", "sparse_categorical_crossentropy", partial(metrics.SparseTopKCategoricalAccuracy, 2),
    partial(metrics.MeanIoU, 3, sparse_y_pred=False),
]  # fmt: skip


def binary(last=1, **options):
    """A function that makes and compiles a classifier with fresh metrics, numbered: Keras numbers them on and on."""

    def fresh(number, metric):
        return metric if isinstance(metric, str) or metric is whole_batch else metric(name=f"metric_{number}")

    def make():
        model = keras.Sequential(
            [keras.Input((5,)), layers.Dense(7, "tanh"), layers.Dense(last, "sigmoid" if last == 1 else "softmax")]
        )
        loss = "binary_crossentropy" if last == 1 else "sparse_categorical_crossentropy"
        made = {name: [fresh(*numbered) for numbered in enumerate(of)] for name, of in options.items()}
        model.compile(keras.optimizers.SGD(0.1), loss, **made)
        return model

    return make


def whole_batch(y_true, y_pred):
    """One number for all rows."""
    return ops.mean(ops.abs(y_true - y_pred))


of_keras_iou = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64", "ignore:You are passing weight as `float`")


@pytest.mark.slow
@of_keras_iou
def test_metrics_of_two_classes():
    """Seventeen metrics, every second one weighted, over ragged batches, equal plain Keras'."""
    make = binary(metrics=BINARY_METRICS[::2], weighted_metrics=BINARY_METRICS[1::2])
    assert_equals_keras(make, fitting(X, BINARY, sample_weight=WEIGHT, batch_size=ROWS_AT_ONCE), devices=(3,))


@pytest.mark.slow
def test_validation_metrics():
    """Metrics of held-out weighted rows, among them some of many thresholds, equal plain Keras'."""
    held_out = (X[:13], BINARY[:13], WEIGHT[:13])
    make = binary(metrics=["mae", metrics.AUC], weighted_metrics=["mse", metrics.Precision])
    assert_equals_keras(make, fitting(X, BINARY, batch_size=ROWS_AT_ONCE, validation_data=held_out), devices=(3,))


@of_keras_iou
@pytest.mark.slow
def test_metrics_of_several_classes():
    """Metrics by name and by object, over ragged batches."""
    assert_equals_keras(binary(3, metrics=CLASS_METRICS), fitting(X, CLASS, batch_size=ROWS_AT_ONCE, epochs=2))


@pytest.mark.slow
def test_a_metric_of_one_number_for_a_batch():
    """It is weighted by rows: in a batch of even shards the mean of all rows, on every placement the same bits."""
    ours = assert_same_bits(binary(metrics=[whole_batch]), fitting(X[:40], BINARY[:40], batch_size=20), devices=(1, 3, 8))
    rows_ = run(binary(metrics=["mae"]), fitting(X[:40], BINARY[:40], batch_size=20), on(3))
    np.testing.assert_allclose(ours.logs["whole_batch"], rows_.logs["mae"], rtol=1e-5)


@pytest.mark.parametrize("count", [41, *slow(43, 8, 3)])
def test_evaluation_metrics_of_any_number_of_rows(count):
    """Batches with fewer rows than replicas put nothing into a metric but their rows."""
    model = run(binary(metrics=["mae", metrics.BinaryAccuracy, *cases([], [metrics.AUC])]), lambda model: model, on(3)).model
    logs = model.evaluate(X[:count], BINARY[:count], batch_size=ROWS_AT_ONCE, verbose=0, return_dict=True)
    y_pred = model.predict(X[:count], batch_size=ROWS_AT_ONCE, verbose=0)
    np.testing.assert_allclose(logs["mae"], np.abs(y_pred - BINARY[:count]).mean(), rtol=1e-5)
    np.testing.assert_allclose(logs["metric_1"], ((y_pred > 0.5) == BINARY[:count]).mean(), rtol=1e-6)
    np.testing.assert_allclose(logs["loss"], keras.losses.BinaryCrossentropy()(BINARY[:count], y_pred), rtol=1e-5)


def test_accuracies_with_and_without_state_and_a_count():
    """A metric object and a function in one compile: both one, then, on wrong labels, both zero. Of eleven rows five are found."""

    def make():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, kernel_initializer="ones")])
        kinds = [metrics.BinaryAccuracy(name="object"), keras.metrics.binary_accuracy, metrics.TruePositives(name="count")]
        model.compile("sgd", "mse", metrics=kinds)
        return model

    model, x = run(make, lambda model: model, on(3)).model, (np.arange(11) % 2).astype("float32")[:, None]
    for y, expected, count in ((x, 1.0, 5), (1 - x, 0.0, 0)):
        logs = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
        assert (logs["object"], logs["binary_accuracy"], logs["count"]) == (expected, expected, count)


def test_losses_in_the_place_of_metrics():
    """Sums, means, and what is made of all rows."""

    def make():
        model = keras.Sequential([layers.Dense(2, "sigmoid")])
        squares, dice = keras.losses.MeanSquaredError(reduction="sum", name="squares"), keras.losses.Dice(name="dice")
        model.compile("sgd", "mse", metrics=[squares, keras.losses.mean_absolute_error, dice])
        return model

    x, y = rows(26, 3), (rows(26, 2, seed=1) > 0.5).astype("float32")
    assert_equals_keras(make, fitting(x, y, batch_size=16), replicas=cases((4,), (1, 4)))


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
    def make():
        model = keras.Sequential([Encoder(), layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    assert_equals_keras(make, fitting(rows(32, 3), rows(32, 2, seed=1), batch_size=8), replicas=cases((4,), (1, 4)))


class Counts(metrics.Metric):
    """A metric of a user's that is a sum over rows, kept as an integer."""

    def __init__(self, name):
        super().__init__(name=name)
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(ops.cast(ops.sum(ops.cast(y_true > 0, "int32")), "int32"))

    def result(self):
        return self.count.value


@pytest.mark.slow
def test_a_metric_of_integers():
    """An integer sum over the rows is exact: every row of both epochs once."""
    ours = assert_same_bits(binary(metrics=[Counts]), fitting(X, BINARY, batch_size=ROWS_AT_ONCE, epochs=2))
    assert ours.logs["metric_0"] == [int(BINARY.sum())] * 2


def test_metrics_start_anew_in_every_epoch_and_evaluation():
    """Nothing of training reaches an evaluation, nor of one epoch the next."""
    make = binary(metrics=["mae", metrics.TruePositives])
    model = run(make, fitting(X, BINARY, batch_size=ROWS_AT_ONCE, epochs=2), on(3)).model
    first = model.evaluate(X[:13], BINARY[:13], batch_size=4, verbose=0)
    assert model.evaluate(X[:13], BINARY[:13], batch_size=4, verbose=0) == first
    history = fitting(X, BINARY, batch_size=ROWS_AT_ONCE)(model).history
    assert 0 <= history["metric_1"][0] <= BINARY.sum()
