"""GANs as Keras' examples write them: a `train_step` of the model's own, no `call()`, means of its own, and noise of a SeedGenerator."""

from __future__ import annotations

from typing import Any

import jax
import keras
from keras import layers, ops

from own_steps import InTurn, Values

SIZE, NOISE = 5, 4


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


class WassersteinGan(InTurn):
    """A critic with a penalty on its gradient between real and made rows, which is updated twice.

    A bias of its outputs would have no gradient, and Adam would make a step of the rounding of it.
    """

    turns = ("critic", "critic", "generator")

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential([keras.Input((SIZE,)), layers.Dense(8, "tanh"), layers.Dense(1, use_bias=False)])
        self.generator = keras.Sequential([keras.Input((NOISE,)), layers.Dense(8, "relu"), layers.Dense(SIZE)])
        self.seeds = keras.random.SeedGenerator(7)
        self.built = True

    def make(self, count: int) -> Any:
        return self.generator(keras.random.normal((count, NOISE), seed=self.seeds))

    def critic_loss(self, real: Any) -> Any:
        fake = self.make(len(real))
        part = keras.random.uniform((len(real), 1), seed=self.seeds)
        slopes = jax.grad(lambda rows: ops.sum(self.critic(rows)))(part * real + (1 - part) * fake)
        penalty = ops.mean((ops.norm(slopes, axis=-1) - 1) ** 2)
        return ops.mean(self.critic(fake)) - ops.mean(self.critic(real)) + 10 * penalty

    def generator_loss(self, real: Any) -> Any:
        return -ops.mean(self.critic(self.make(len(real))))
