"""Mixed precision under Keras' policies: the loss scale is one for all replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un

ROWS = np.random.default_rng(0).standard_normal((24, 6)).astype("float32")
TARGETS = np.random.default_rng(1).standard_normal((24, 2)).astype("float32")


@pytest.fixture(autouse=True)
def policy_restored():
    yield
    keras.config.set_dtype_policy("float32")


def made(devices: int, replicas: int = 8, optimizer=None) -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    with un.MirroredStrategy(devices=devices, replicas=replicas).scope():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(8, "relu"), layers.Dense(2, dtype="float32")])
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def loss_scale(model: keras.Model) -> float:
    return float(model.optimizer.dynamic_scale.value)


def test_dtypes_can_be_printed():
    model = made(2)
    hidden, last = model.layers
    assert (hidden.compute_dtype, hidden.variable_dtype, last.compute_dtype) == ("float16", "float32", "float32")
    assert {v.dtype for v in model.trainable_variables} == {"float32"}


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_one_infinite_replica_skips_the_step_for_all_and_halves_the_scale_once(devices):
    model = made(devices)
    before, scale = un.fingerprint(model.get_weights()), loss_scale(model)
    x = ROWS.copy()
    x[9] = 60000.0  # finite in float16, infinite after a matrix product; a row of replica 3
    model.train_on_batch(x, TARGETS)
    assert un.fingerprint(model.get_weights()) == before
    assert loss_scale(model) == scale / 2
    model.train_on_batch(ROWS, TARGETS)
    assert un.fingerprint(model.get_weights()) != before
    assert loss_scale(model) == scale / 2


def test_the_bits_and_the_scale_are_the_same_on_every_placement():
    seen = []
    for devices in (1, 3, 8):
        model = made(devices)
        model.fit(ROWS, TARGETS, batch_size=7, epochs=3, verbose=0)
        seen.append((un.fingerprint(model), loss_scale(model)))
    assert len(set(seen)) == 1


def test_gradients_are_clipped_after_they_are_unscaled():
    """The step of a clipped optimizer is bounded by its clip, not by the scale of thousands."""
    model = made(3, optimizer=keras.optimizers.SGD(1.0, global_clipnorm=0.01))
    before = [np.asarray(v.value) for v in model.trainable_variables]
    model.train_on_batch(ROWS, TARGETS)
    moved = np.sqrt(sum(((np.asarray(v.value) - b) ** 2).sum() for v, b in zip(model.trainable_variables, before, strict=True)))
    np.testing.assert_allclose(moved, 0.01, rtol=1e-4)
