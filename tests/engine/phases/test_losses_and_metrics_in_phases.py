"""All losses and metrics of Keras in phases: what compares rows with one another gathers them, and nothing else does."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from whole_batch_of_phases import analyse

ROWS = 10
CLASSES = 4
GATHERING = {"Circle": {"dot_general", "eq"}}
"""The equations of losses that compare all pairs of rows."""

OPTIONS = {
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0]},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0]},
    "MeanIoU": {"num_classes": CLASSES},
    "OneHotMeanIoU": {"num_classes": CLASSES},
}


def list_classes(module, base):
    classes = {cls for _, cls in inspect.getmembers(module, inspect.isclass) if issubclass(cls, base) and cls is not base}
    return sorted(classes, key=lambda cls: cls.__name__)


def draw(name, rng):
    """What a loss or a metric of this name is given: labels and predictions, or values."""
    shares = rng.dirichlet(np.ones(CLASSES), ROWS).astype("float32")
    classes = rng.integers(0, CLASSES, ROWS, "int32")
    if name in ("Mean", "Sum"):
        return (shares,)
    if name in ("IoU", "MeanIoU"):
        return classes, rng.integers(0, CLASSES, ROWS, "int32")
    if name == "BinaryIoU":
        return rng.integers(0, 2, ROWS, "int32"), shares[:, 0]
    if name == "CTC":
        return rng.integers(1, CLASSES, (ROWS, 3), "int32"), rng.random((ROWS, 6, CLASSES + 1), "float32")
    are_numbers = "Sparse" in name or name in ("Circle", "CategoricalGeneralizedCrossEntropy")
    return (classes if are_numbers else np.eye(CLASSES, dtype="float32")[classes]), shares


def list_gathered(step, state, batch):
    phased = analyse(step, state, tuple(map(jnp.asarray, batch)), sizes=(5, 5))
    return {equation.name for equation in phased.analysis.gathered.values()}


@pytest.mark.parametrize("cls", list_classes(keras.losses, keras.losses.Loss))
def test_losses(cls, rng):
    loss = cls(**OPTIONS.get(cls.__name__, {}))

    def step(state, batch):
        return [state[0] - jax.grad(lambda scale: loss(batch[0], batch[1] * scale))(state[0])], ()

    assert list_gathered(step, [jnp.float32(1)], draw(cls.__name__, rng)) == GATHERING.get(cls.__name__, set())


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # by Keras' intersections over unions
@pytest.mark.parametrize("cls", list_classes(keras.metrics, keras.metrics.Metric))
def test_metrics(cls, rng):
    metric, batch = cls(**OPTIONS.get(cls.__name__, {})), draw(cls.__name__, rng)
    metric.update_state(*batch)  # some make their variables then
    state = [variable.value for variable in metric.variables]
    assert list_gathered(lambda state, batch: (metric.stateless_update_state(state, *batch), ()), state, batch) == set()
