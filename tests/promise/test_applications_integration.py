"""Whole architectures of keras.applications: the same bits on one device and on three."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import applications, layers

import unisono as un
from trainings import assert_same_bits, fitting, labels, rows

X, Y = rows(11, 32, 32, 3), labels(11, 3)
APPLICATIONS = {
    "MobileNetV2": lambda inputs: applications.MobileNetV2(
        input_tensor=inputs, alpha=0.35, weights=None, include_top=False, pooling="avg"
    ),
    "EfficientNetV2B0": lambda inputs: applications.EfficientNetV2B0(
        input_tensor=inputs, weights=None, include_top=False, pooling="avg", include_preprocessing=False
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", APPLICATIONS)
def test_two_steps_of_an_application(name):
    """Eight rows and three for four replicas, then predictions: batch statistics, drawn paths and all."""
    outputs = []

    def make():
        body = APPLICATIONS[name](keras.Input((32, 32, 3)))
        model = keras.Model(body.inputs, layers.Dense(3)(body.outputs[0]))
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def fit(model):
        history = fitting(X, Y, batch_size=8)(model)
        outputs.append(model.predict(X[:4], batch_size=4, verbose=0))
        return history

    ours = assert_same_bits(make, fit, replicas=4)
    assert np.isfinite(ours.logs["loss"]).all()
    assert un.fingerprint(outputs[0]) == un.fingerprint(outputs[1])
