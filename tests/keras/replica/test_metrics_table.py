"""Every metric of Keras: merged over replicas exactly, or refused by its name. docs/metrics.md shows the table of this file."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, metrics, ops

from sizes import RAGGED, ROWS_AT_ONCE, mostly_slow
from trainings import assert_same_bits, fitting, labels, rows, run

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "metrics.md"
COUNT, BATCH = RAGGED, ROWS_AT_ONCE
X = rows(COUNT, 5)
CLASS = labels(COUNT, 3)
WEIGHT = np.where(np.arange(COUNT) % 5, np.abs(rows(COUNT, seed=2)), 0).astype("float32")
HELD_OUT = slice(0, 5)


def distances(y_true: Any, y_pred: Any) -> Any:
    """A function of the user's own, with one value for each row."""
    return ops.mean(ops.sqrt(ops.abs(y_true - y_pred)), axis=-1)


class Rounded(layers.Layer):
    """Classes as whole numbers, as some metrics want them."""

    def call(self, x: Any) -> Any:
        return ops.clip(ops.round(x + 1), 0, 2)


TASKS: dict[str, tuple[Callable[[], list[Any]], str, np.ndarray]] = {
    "two classes": (lambda: [layers.Dense(1, "sigmoid")], "binary_crossentropy", (CLASS > 0).astype("float32")[:, None]),
    "one-hot classes": (lambda: [layers.Dense(3, "softmax")], "categorical_crossentropy", np.eye(3, dtype="float32")[CLASS]),
    "classes": (lambda: [layers.Dense(3, "softmax")], "sparse_categorical_crossentropy", CLASS),
    "whole numbers": (lambda: [layers.Dense(1), Rounded()], "mse", CLASS[:, None]),
    "numbers": (lambda: [layers.Dense(3, "softplus")], "mse", np.abs(rows(COUNT, 3, seed=1))),
}
"""For each: the last layers of a model, its loss and its targets."""

METRICS: dict[str, dict[str, list[Callable[..., Any]]]] = {
    "two classes": {
        "AUC": [metrics.AUC, partial(metrics.AUC, curve="PR"), partial(metrics.AUC, num_thresholds=5, from_logits=True)],
        "BinaryAccuracy": [metrics.BinaryAccuracy],
        "BinaryCrossentropy": [metrics.BinaryCrossentropy],
        "BinaryIoU": [metrics.BinaryIoU],
        "FalseNegatives": [metrics.FalseNegatives, partial(metrics.FalseNegatives, thresholds=[0.2, 0.5, 0.7])],
        "FalsePositives": [metrics.FalsePositives],
        "Hinge": [metrics.Hinge],
        "Precision": [metrics.Precision],
        "PrecisionAtRecall": [partial(metrics.PrecisionAtRecall, 0.5)],
        "Recall": [metrics.Recall],
        "RecallAtPrecision": [partial(metrics.RecallAtPrecision, 0.5)],
        "SensitivityAtSpecificity": [partial(metrics.SensitivityAtSpecificity, 0.5)],
        "SpecificityAtSensitivity": [partial(metrics.SpecificityAtSensitivity, 0.5)],
        "SquaredHinge": [metrics.SquaredHinge],
        "TrueNegatives": [metrics.TrueNegatives],
        "TruePositives": [metrics.TruePositives],
    },
    "one-hot classes": {
        "AUC": [partial(metrics.AUC, multi_label=True, num_labels=3)],
        "CategoricalAccuracy": [metrics.CategoricalAccuracy],
        "CategoricalCrossentropy": [partial(metrics.CategoricalCrossentropy, label_smoothing=0.1)],
        "CategoricalHinge": [metrics.CategoricalHinge],
        "F1Score": [metrics.F1Score, partial(metrics.F1Score, average="micro")],
        "FBetaScore": [partial(metrics.FBetaScore, average="weighted", beta=2.0, threshold=0.4)],
        "KLDivergence": [metrics.KLDivergence],
        "OneHotIoU": [partial(metrics.OneHotIoU, num_classes=3, target_class_ids=[0, 2])],
        "OneHotMeanIoU": [partial(metrics.OneHotMeanIoU, num_classes=3)],
        "Precision": [partial(metrics.Precision, top_k=2, class_id=1)],
        "TopKCategoricalAccuracy": [partial(metrics.TopKCategoricalAccuracy, k=2)],
    },
    "classes": {
        "MeanIoU": [partial(metrics.MeanIoU, num_classes=3, sparse_y_pred=False)],
        "SparseCategoricalAccuracy": [metrics.SparseCategoricalAccuracy],
        "SparseCategoricalCrossentropy": [metrics.SparseCategoricalCrossentropy],
        "SparseTopKCategoricalAccuracy": [partial(metrics.SparseTopKCategoricalAccuracy, k=2)],
    },
    "whole numbers": {
        "Accuracy": [metrics.Accuracy],
        "IoU": [partial(metrics.IoU, num_classes=3, target_class_ids=[1], ignore_class=0)],
        "MeanIoU": [partial(metrics.MeanIoU, num_classes=3)],
    },
    "numbers": {
        "ConcordanceCorrelation": [metrics.ConcordanceCorrelation],
        "CosineSimilarity": [metrics.CosineSimilarity],
        "LogCoshError": [metrics.LogCoshError],
        "MeanAbsoluteError": [metrics.MeanAbsoluteError],
        "MeanAbsolutePercentageError": [metrics.MeanAbsolutePercentageError],
        "MeanMetricWrapper": [partial(metrics.MeanMetricWrapper, distances)],
        "MeanSquaredError": [metrics.MeanSquaredError],
        "MeanSquaredLogarithmicError": [metrics.MeanSquaredLogarithmicError],
        "PearsonCorrelation": [metrics.PearsonCorrelation],
        "Poisson": [metrics.Poisson],
        "R2Score": [metrics.R2Score, partial(metrics.R2Score, class_aggregation="variance_weighted_average")],
        "RootMeanSquaredError": [metrics.RootMeanSquaredError],
    },
}
"""For each task, the metrics that are compiled into it, each in the forms in which its state differs."""

FED_BY_THE_MODEL = {"Mean": metrics.Mean, "Sum": metrics.Sum}
"""Metrics of plain values. compile() has none to give them; the model feeds them."""

of_keras = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64", "ignore:You are passing weight as `float`")


def kinds_of_keras() -> set[str]:
    """The names of the concrete metrics of the Keras that is installed."""
    found = {name: getattr(metrics, name) for name in dir(metrics)}
    return {
        name
        for name, kind in found.items()
        if isinstance(kind, type) and issubclass(kind, metrics.Metric) and kind is not metrics.Metric
    }


def test_the_table_names_every_metric_of_keras():
    """A metric that a new Keras brings is tried here before anyone trusts it."""
    assert {name for of in METRICS.values() for name in of} | FED_BY_THE_MODEL.keys() == kinds_of_keras()


def compiled(task: str) -> Callable[[], keras.Model]:
    """A function that makes a model of this task with all its metrics, each with sample weights and without."""

    def fresh(prefix: str) -> list[Any]:
        forms = [(name, number, form) for name, of in METRICS[task].items() for number, form in enumerate(of)]
        return [form(name=f"{prefix} {name} {number}") for name, number, form in forms]

    def make() -> keras.Model:
        last, loss, _ = TASKS[task]
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), *last()])
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=fresh("plain"), weighted_metrics=fresh("weighted"))
        return model

    return make


def trained(task: str) -> Callable[[keras.Model], Any]:
    """A fit in ragged batches of weighted rows, with weighted rows held out."""
    y = TASKS[task][2]
    return fitting(X, y, sample_weight=WEIGHT, batch_size=BATCH, validation_data=(X[HELD_OUT], y[HELD_OUT], WEIGHT[HELD_OUT]))


@of_keras
@pytest.mark.parametrize("task", mostly_slow(TASKS, "whole numbers"))
def test_metrics_in_training_and_validation(task):
    """The same bits on one device and three, and the values of plain Keras, of training and held-out rows, with weights and
    without."""
    ours = assert_same_bits(compiled(task), trained(task)).logs
    plain = run(compiled(task), trained(task)).logs
    assert sorted(ours) == sorted(plain)
    wrong = {name: (ours[name], value) for name, value in plain.items() if not np.allclose(ours[name], value, rtol=1e-5)}
    assert wrong == {}, "(ours, plain Keras')"


class Feeding(keras.Sequential):
    """Feeds a mean and a sum with one value for each row, with the rows' weights and without."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plain = [kind(name=f"plain {name}") for name, kind in FED_BY_THE_MODEL.items()]
        self.weighted = [kind(name=f"weighted {name}") for name, kind in FED_BY_THE_MODEL.items()]

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        values = distances(y, y_pred)
        for metric in self.plain:
            metric.update_state(values)
        for metric in self.weighted:
            metric.update_state(values, sample_weight=sample_weight)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def test_metrics_that_the_model_feeds():
    """Mean and Sum of a value for each row: the same bits on every placement, and plain Keras' values."""

    def make():
        model = Feeding([keras.Input((5,)), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    ours, plain = assert_same_bits(make, trained("numbers")).logs, run(make, trained("numbers")).logs
    assert {f"plain {name}" for name in FED_BY_THE_MODEL} < set(plain)
    for name, values in plain.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5, err_msg=name)


def table() -> list[str]:
    """The table of docs/metrics.md, one line a metric, with what its objects keep."""
    of_tasks = [(name, task, forms[0]) for task, of in METRICS.items() for name, forms in of.items()]
    kept = [(name, "compile(), " + task, form) for name, task, form in of_tasks]
    kept += [(name, "fed by the model", kind) for name, kind in FED_BY_THE_MODEL.items()]
    lines: dict[str, tuple[list[str], Any]] = {}
    for name, where, form in kept:
        lines.setdefault(name, ([], form()))[0].append(where.removeprefix("compile(), "))
    return ["| metric | state | sample weights | tried on |", "| --- | --- | --- | --- |"] + [
        f"| `{name}` | {list_state(metric)} | {how_weighted(metric)} | {', '.join(where)} |"
        for name, (where, metric) in sorted(lines.items())
    ]


def list_state(metric: metrics.Metric) -> str:
    if isinstance(metric, (metrics.FBetaScore, metrics.R2Score)):  # they make their state when they first see shapes
        metric.update_state(np.ones((2, 3)), np.ones((2, 3)))
    kept = ", ".join(f"`{variable.name}`" for variable in metric.variables)
    return f"sums of {kept}"


def how_weighted(metric: metrics.Metric) -> str:
    integers = all(np.issubdtype(np.dtype(v.dtype), np.integer) for v in metric.variables)
    return "cut to whole numbers by Keras" if integers else "equal"


@of_keras
def test_the_table_of_the_documentation():
    """docs/metrics.md has the lines that this file makes: copy them from the failure."""
    shown = DOCS.read_text().partition("## Every metric of Keras")[2]
    assert re.findall(r"^\|.*\|$", shown, re.MULTILINE) == table()
