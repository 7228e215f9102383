"""GANs as Keras' examples write them: a `train_step` of the model's own, no `call()`, means of its own, and noise of a SeedGenerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import pytest

from gans import SIZE, Gan, TwoOptimizers
from own_steps import Values
from trainings import assert_close_logs, assert_same_bits, distance, fitting, on, rows, run

REAL = rows(32, SIZE)
FIT = fitting(REAL, batch_size=16, epochs=2)


class OneUpdate(Gan):
    """Both are updated at once, from the same weights."""

    def train_step(self, state: Any, data: Any) -> Any:
        real, (trainable, non_trainable, slots, metrics) = data, state
        weights, others = Values(self.trainable_variables, trainable), Values(self.non_trainable_variables, non_trainable)
        d, g = self.discriminator.trainable_variables, self.generator.trainable_variables
        fake, _ = self.generator.stateless_call(weights[g], [], self.noise(others, len(real)))
        d_loss, d_gradients = jax.value_and_grad(self.d_loss)(weights[d], fake, real)
        g_loss, g_gradients = jax.value_and_grad(self.g_loss)(weights[g], weights[d], self.noise(others, len(real)))
        gradients = Values([*d, *g], [*d_gradients, *g_gradients])[self.trainable_variables]
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        logs, metrics = self.tracked(metrics, d_loss, g_loss)
        return logs, (trainable, others.all, slots, metrics)


def two_optimizers() -> keras.Model:
    model = TwoOptimizers()
    model.compile(d_optimizer=keras.optimizers.Adam(0.01), g_optimizer=keras.optimizers.Adam(0.02))
    return model


def one_update() -> keras.Model:
    model = OneUpdate()
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model


@pytest.mark.parametrize("make", [two_optimizers, pytest.param(one_update, marks=pytest.mark.slow)])
def test_one_replica_is_keras(make: Callable[[], Any]):
    plain, alone = run(make, FIT), run(make, FIT, on(1, replicas=1))
    assert plain.logs.keys() == {"d_loss", "g_loss"}
    assert plain.logs["d_loss"][0] != plain.logs["d_loss"][1]
    assert distance(alone.model, plain.model) < 1e-5
    assert_close_logs(alone.logs, plain.logs)


@pytest.mark.parametrize("make", [two_optimizers, pytest.param(one_update, marks=pytest.mark.slow)])
def test_replicas_train_as_keras_with_the_same_bits_on_one_device_and_two(make: Callable[[], Any]):
    """With the noise of the whole batch, and the second gradient through the weights that the first one has updated."""
    found, plain = assert_same_bits(make, FIT, devices=(1, 2), replicas=4), run(make, FIT)
    assert distance(found.model, plain.model) < 1e-5
    assert_close_logs(found.logs, plain.logs)
