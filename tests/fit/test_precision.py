"""Mixed precision under Keras' policies: the loss scale is one for all replicas."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import cases, slow

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


class Counted(keras.Model):
    """Has a counter and a factor of its own, beside those of a layer."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")
        self.factor = self.add_weight(shape=(), initializer=keras.initializers.Constant(1.001), name="factor")

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1.0)
        return self.dense(x) * self.factor


@pytest.mark.parametrize("replicas", [None, 1, 4])
def test_variables_of_the_model_itself_are_not_rounded(replicas):
    """In bfloat16 there is no number 257. Keras' fit does not cast them either."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    with un.OneDeviceStrategy(replicas=replicas).scope() if replicas else contextlib.nullcontext():
        model = Counted()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.steps.assign(250.0)
    model.fit(np.tile(ROWS, (2, 1)), np.tile(TARGETS, (2, 1)), batch_size=4, verbose=0)
    assert float(model.steps.value) == 262


@pytest.mark.parametrize("devices", [3, *slow(1, 8)])
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
    for devices in cases((1, 3), (1, 3, 8)):
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
