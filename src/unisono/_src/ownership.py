"""The Keras objects that were made in the scope of a strategy."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import keras

from unisono._src.keras_private.compiled_losses import list_all_metrics
from unisono._src.typing import UserObject

T = TypeVar("T")


class OwnedObjects:
    """The layers, optimizers, metrics and variables of a strategy, by weak references."""

    def __init__(self, strategy: Any = None) -> None:
        self._strategy = None if strategy is None else weakref.ref(strategy)
        _all.add(self)
        self._made: dict[int, weakref.ref[Any]] = {}
        self._models: dict[int, weakref.ref[Any]] = {}
        """The models among them. Every run of a loop asks for them."""

    def add(self, created: UserObject) -> None:
        key = id(created)
        for made in (self._made, self._models) if isinstance(created, keras.Model) else (self._made,):
            made[key] = weakref.ref(created, lambda _, made=made: made.pop(key, None))

    def __contains__(self, candidate: object) -> bool:
        reference = self._made.get(id(candidate))
        return reference is not None and reference() is candidate

    @property
    def strategy(self) -> Any:
        return None if self._strategy is None else self._strategy()

    @property
    def layers(self) -> list[keras.Layer]:
        return self._find(keras.Layer)

    @property
    def models(self) -> list[keras.Model]:
        return [model for reference in list(self._models.values()) if (model := reference()) is not None]

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Return the optimizers, those of compiled models included."""
        of_models = [getattr(model, "optimizer", None) for model in self.models]
        optimizers = [*self._find(keras.optimizers.Optimizer), *(optimizer for optimizer in of_models if optimizer is not None)]
        return list({id(optimizer): optimizer for optimizer in optimizers}.values())

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """Return the metrics, those of compiled models included."""
        of_models = [metric for model in self.models for metric in list_all_metrics(model)]
        return list({id(metric): metric for metric in [*self._find(keras.metrics.Metric), *of_models]}.values())

    @property
    def variables(self) -> set[int]:
        """Return the ids of all variables that were made, or that belong to an object that was made."""
        holders = [*self._find(keras.Layer), *self.optimizers, *self.metrics]
        made = {id(variable) for variable in self._find(keras.Variable)}
        return made | {id(variable) for holder in holders for variable in holder.variables}

    @property
    def layer_variable_ids(self) -> set[int]:
        """Return the ids of the layers' and metrics' variables."""
        holders = [*self._find(keras.Layer), *self.metrics]
        return {id(variable) for holder in holders for variable in holder.variables}

    def _find(self, kind: type[T]) -> list[T]:
        """Return the objects of a class."""
        references = list(self._made.values())
        return [made for reference in references if isinstance(made := reference(), kind) and made is not None]


_all: weakref.WeakSet[OwnedObjects] = weakref.WeakSet()
"""The owned objects of all strategies."""


def find_strategy(created: object) -> Any:
    """Return the strategy in whose scope an object was made; None outside of every scope."""
    return next((owned.strategy for owned in list(_all) if created in owned), None)
