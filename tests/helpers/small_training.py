"""A small model that is trained batch by batch, for tests of single contributions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

import unisono as un
from trainings import crossentropy

REPLICAS = 6
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((16, 6)).astype("float32"), RNG.integers(0, 3, 16).astype("int32")
WEIGHTS = 53
"""Numbers of the weights, whose gradients are the first of a contribution."""


class Training:
    """The model in the scope of a strategy, always from the same start."""

    reduction = "sum_over_batch_size"

    def __init__(self, strategy: un.Strategy) -> None:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            hidden = [layers.Dense(5, "relu"), layers.Dropout(0.2)]
            self.model = keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(3)])
        self.model.compile("adam", crossentropy(self.reduction))

    def step(self) -> None:
        self.model.train_on_batch(X, Y)


class FewRows(Training):
    """Most replicas have no rows."""

    def step(self) -> None:
        self.model.train_on_batch(X[:2], Y[:2])


class Weighted(Training):
    """The sum of weights is counted on the devices."""

    reduction = "mean_with_sample_weight"

    def step(self) -> None:
        self.model.train_on_batch(X, Y, np.arange(1.0, 17.0, dtype="float32"))


class Looped(Training):
    """A step of a loop of the user's."""

    def __init__(self, strategy: un.Strategy) -> None:
        super().__init__(strategy)
        self.strategy = strategy
        with strategy.scope():
            self.model.optimizer.build(self.model.trainable_variables)
        self.dataset = strategy.distribute_dataset((X, Y), batch_size=len(X), shuffle=False)
        self.whole_epoch = un.function(self.epoch)

    def step(self) -> None:
        self.whole_epoch()

    def epoch(self) -> None:
        for batch in self.dataset:
            self.strategy.run(self.replica_step, args=(batch,))

    def replica_step(self, batch: Any) -> Any:
        x, y = batch
        losses = crossentropy(None)
        loss, gradients = un.value_and_grad(
            lambda: un.compute_average_loss(losses(y, self.model(x, training=True))), self.model.trainable_variables
        )
        self.model.optimizer.apply(gradients, self.model.trainable_variables)
        return loss


TRAININGS: dict[str, type[Training]] = {"whole": Training, "few rows": FewRows, "weighted": Weighted, "looped": Looped}
