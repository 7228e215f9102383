"""What was made in the scope of a strategy."""

from __future__ import annotations

import weakref
from typing import Any

import keras

from unisono._src import keras_private


class Owned:
    """The layers, optimizers, metrics and variables of a strategy, as long as somebody else holds them."""

    def __init__(self, strategy: Any = None) -> None:
        self._strategy = None if strategy is None else weakref.ref(strategy)
        _all.add(self)
        self._made: dict[int, weakref.ref[Any]] = {}
        self._models: dict[int, weakref.ref[Any]] = {}
        """Among them; asked for at every run of a loop."""

    def add(self, thing: Any) -> None:
        key = id(thing)
        for made in (self._made, self._models) if isinstance(thing, keras.Model) else (self._made,):
            made[key] = weakref.ref(thing, lambda _, made=made: made.pop(key, None))

    def __contains__(self, thing: Any) -> bool:
        found = self._made.get(id(thing))
        return found is not None and found() is thing

    @property
    def strategy(self) -> Any:
        return None if self._strategy is None else self._strategy()

    @property
    def layers(self) -> list[Any]:
        return self._of(keras.Layer)

    @property
    def models(self) -> list[Any]:
        return [model for ref in list(self._models.values()) if (model := ref()) is not None]

    @property
    def optimizers(self) -> list[Any]:
        """Those of compiled models among them."""
        of_models = [getattr(model, "optimizer", None) for model in self.models]
        found = [*self._of(keras.optimizers.Optimizer), *(o for o in of_models if o is not None)]
        return list({id(o): o for o in found}.values())

    @property
    def metrics(self) -> list[Any]:
        """Those of compiled models among them."""
        of_models = [m for model in self.models for m in keras_private.leaf_metrics_of(model)]
        return list({id(m): m for m in [*self._of(keras.metrics.Metric), *of_models]}.values())

    @property
    def variables(self) -> set[int]:
        """The ids of all variables that belong to what was made."""
        holders = [*self._of(keras.Layer), *self.optimizers, *self.metrics]
        return {id(v) for v in self._of(keras.Variable)} | {id(v) for holder in holders for v in holder.variables}

    @property
    def variables_of_layers(self) -> set[int]:
        """The ids of the layers' and metrics' variables."""
        return {id(v) for holder in [*self._of(keras.Layer), *self.metrics] for v in holder.variables}

    def _of(self, kind: type) -> list[Any]:
        return [thing for ref in list(self._made.values()) if isinstance(thing := ref(), kind) and thing is not None]


_all: weakref.WeakSet[Owned] = weakref.WeakSet()
"""Of all strategies that there are."""


def strategy_of(thing: Any) -> Any:
    """In whose scope it was made; None outside of every scope."""
    return next((owned.strategy for owned in list(_all) if thing in owned), None)
