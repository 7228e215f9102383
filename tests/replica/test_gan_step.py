"""GANs as Keras' examples write them: a `train_step` of the model's own, no `call()`, means of its own, and noise of a SeedGenerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import pytest
from keras import layers, ops

from trainings import assert_close_logs, assert_same_bits, distance, fitting, on, rows, run

SIZE, NOISE = 5, 4
REAL = rows(32, SIZE)
FIT = fitting(REAL, batch_size=16, epochs=2)


class Values:
    """The values of variables, as a step gets them, found by the variables."""

    def __init__(self, variables: list[Any], values: list[Any]) -> None:
        self._variables = variables
        self._values = {id(v): value for v, value in zip(variables, values, strict=True)}

    def __getitem__(self, variables: list[Any]) -> list[Any]:
        return [self._values[id(v)] for v in variables]

    def __setitem__(self, variables: list[Any], values: list[Any]) -> None:
        self._values |= {id(v): value for v, value in zip(variables, values, strict=True)}

    @property
    def all(self) -> list[Any]:
        return self[self._variables]


class Gan(keras.Model):
    """What both forms below share."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = keras.Sequential([keras.Input((SIZE,)), layers.Dense(8, "relu"), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((NOISE,)), layers.Dense(8, "relu"), layers.Dense(SIZE)])
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.built = True

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss_tracker, self.g_loss_tracker]

    def noise(self, others: Values, count: int) -> Any:
        """As many vectors as there are real rows; the seed moves on in the state."""
        seed = self.seed_generator.state
        with keras.StatelessScope(state_mapping=[(seed, others[[seed]][0])]) as scope:
            drawn = keras.random.normal((count, NOISE), seed=self.seed_generator)
        others[[seed]] = [scope.get_current_value(seed)]
        return drawn

    def d_loss(self, weights: list[Any], fake: Any, real: Any) -> Any:
        ones = ops.ones((len(real), 1))
        answers, _ = self.discriminator.stateless_call(weights, [], ops.concatenate([real, fake]))
        return self.loss_fn(ops.concatenate([ones, 0 * ones]), answers)

    def g_loss(self, weights: list[Any], d_weights: list[Any], noise: Any) -> Any:
        fake, _ = self.generator.stateless_call(weights, [], noise)
        answers, _ = self.discriminator.stateless_call(d_weights, [], fake)
        return self.loss_fn(ops.ones((len(noise), 1)), answers)

    def tracked(self, values: list[Any], *losses: Any) -> tuple[dict[str, Any], list[Any]]:
        new = [m.stateless_update_state(values[2 * i : 2 * i + 2], losses[i]) for i, m in enumerate(self.metrics)]
        logs = {m.name: m.stateless_result(state) for m, state in zip(self.metrics, new, strict=True)}
        return logs, [value for state in new for value in state]


class TwoOptimizers(Gan):
    """The generator is judged by the discriminator that was just updated. The optimizers' variables are state of the model."""

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        d_optimizer.build(self.discriminator.trainable_variables)
        g_optimizer.build(self.generator.trainable_variables)
        self.slots = [d_optimizer.variables, g_optimizer.variables]

    def train_step(self, state: Any, data: Any) -> Any:
        real, (trainable, non_trainable, slots, metrics) = data, state
        weights, others = Values(self.trainable_variables, trainable), Values(self.non_trainable_variables, non_trainable)
        d, g = self.discriminator.trainable_variables, self.generator.trainable_variables
        fake, _ = self.generator.stateless_call(weights[g], [], self.noise(others, len(real)))
        d_loss, gradients = jax.value_and_grad(self.d_loss)(weights[d], fake, real)
        weights[d], others[self.slots[0]] = self.d_optimizer.stateless_apply(others[self.slots[0]], gradients, weights[d])
        g_loss, gradients = jax.value_and_grad(self.g_loss)(weights[g], weights[d], self.noise(others, len(real)))
        weights[g], others[self.slots[1]] = self.g_optimizer.stateless_apply(others[self.slots[1]], gradients, weights[g])
        logs, metrics = self.tracked(metrics, d_loss, g_loss)
        return logs, (weights.all, others.all, slots, metrics)


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
