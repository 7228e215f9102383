"""Models with a `train_step(state, data)` of their own: one update as Keras' guide writes it, and several nets in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras


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


class Guided(keras.Model):
    """Minimizes the sum of its `losses`, a dict, and shows their means over batches."""

    names: tuple[str, ...] = ("loss",)

    def __init__(self) -> None:
        super().__init__()
        self.means = [keras.metrics.Mean(name=name) for name in self.names]

    @property
    def metrics(self) -> list[Any]:
        return self.means

    def losses_of(self, x: Any, outputs: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, slots, metrics = state

        def compute(trainable: list[Any]) -> Any:
            outputs, after = self.stateless_call(trainable, non_trainable, data, training=True)
            losses = self.losses_of(data, outputs)
            return sum(losses), (losses, after)

        (_, (losses, after)), gradients = jax.value_and_grad(compute, has_aux=True)(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        tracked = [m.stateless_update_state(metrics[2 * i : 2 * i + 2], losses[i]) for i, m in enumerate(self.means)]
        logs = {m.name: m.stateless_result(new) for m, new in zip(self.means, tracked, strict=True)}
        return logs, (trainable, after, slots, [value for new in tracked for value in new])


class ByGradients(keras.Sequential):
    """Applies gradients that a function has made in its own way, of (loss of weights, rows and labels; weights; rows; labels)."""

    def __init__(self, make_gradients: Callable[..., Any], layers: list[Any]) -> None:
        super().__init__(layers)
        self.make_gradients = make_gradients

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, slots, metrics = state

        def compute(weights: list[Any], x: Any, y: Any) -> Any:
            return self.compute_loss(x, y, self.stateless_call(weights, non_trainable, x)[0])

        loss, gradients = self.make_gradients(compute, trainable, *data)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": loss}, (trainable, non_trainable, slots, metrics)


class InTurn(keras.Model):
    """Nets that are updated in turn, each by an optimizer and a loss of its own, which reads what was updated before.

    A turn names a net, and the loss is the method `<net>_loss`. What optimizers remember is state of the model.
    """

    turns: tuple[str, ...] = ()

    def list_trained(self, turn: str) -> list[Any]:
        return getattr(self, turn).trainable_variables

    def compute_turn(self, turn: str, data: Any) -> Any:
        return getattr(self, f"{turn}_loss")(data)

    def compile(self, **optimizers: Any) -> None:
        super().compile()
        self.optimizers = optimizers
        for name, optimizer in optimizers.items():
            optimizer.build(self.list_trained(name))
        self.slots = [optimizer.variables for optimizer in optimizers.values()]

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, slots, metrics = state
        variables = [*self.trainable_variables, *self.non_trainable_variables]
        values, logs = Values(variables, [*trainable, *non_trainable]), {}
        for name in self.turns:
            mine, optimizer = self.list_trained(name), self.optimizers[name]

            def compute(weights: list[Any], mine: Any = mine, name: str = name) -> Any:
                mapping = [*zip(variables, values.all, strict=True), *zip(mine, weights, strict=True)]
                with keras.StatelessScope(state_mapping=mapping) as scope:
                    loss = self.compute_turn(name, data)
                return loss, [scope.get_current_value(v) for v in self.non_trainable_variables]

            (logs[name], after), gradients = jax.value_and_grad(compute, has_aux=True)(values[mine])
            values[self.non_trainable_variables] = after
            values[mine], values[optimizer.variables] = optimizer.stateless_apply(
                values[optimizer.variables], gradients, values[mine]
            )
        return logs, (values[self.trainable_variables], values[self.non_trainable_variables], slots, metrics)
