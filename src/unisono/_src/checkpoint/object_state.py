"""What Keras objects hold, by names that follow their structure, and how it is put back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from unisono._src import keras_private
from unisono._src.checkpoint import compatibility, configuration
from unisono._src.fingerprint import Contents

KINDS = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable)


class KerasState:
    """The variables of some named objects."""

    def __init__(self, things: Mapping[str, Any]) -> None:
        self.things = dict(things)
        self._known: tuple[list[int], dict[str, Any]] = ([], {})

    @property
    def variables(self) -> dict[str, Any]:
        """By name; what two objects share is listed once."""
        now = [id(variable) for thing in self.things.values() for variable in all_variables(thing)]
        if now != self._known[0]:  # to walk through a large model takes a while
            found: dict[int, tuple[str, Any]] = {}
            for name, thing in self.things.items():
                for path, variable in keras_private.variables_by_structure(thing, name):
                    found.setdefault(id(variable), (path, variable))
            self._known = now, dict(found.values())
        return self._known[1]

    def values(self) -> dict[str, Any]:
        """The newest values, also in a callback, while a loop of Keras holds them outside of the model."""
        newest: dict[int, Any] = {}
        for thing in self.things.values():
            if isinstance(thing, keras.Model):
                newest |= keras_private.newest_values(thing)
        newest |= {id(v): v.value for v in self.variables.values() if id(v) not in newest}
        return {name: newest[id(v)] for name, v in self.variables.items()}

    def put(self, where: str, theirs: Mapping[str, np.ndarray], partial: bool = False) -> None:
        """Assigns all of them, or raises and assigns none. Only what is `partial` may leave something out."""
        ours = self.variables
        theirs = {name: array for name, array in theirs.items() if name in ours} if partial else dict(theirs)
        ours, theirs, fresh = without_unbuilt_metrics(ours, theirs)
        compatibility.check(where, theirs, ours)
        for name in fresh:
            self.things[name].reset_metrics()
        for name, variable in ours.items():
            variable.assign(theirs[name])

    def makes(self) -> dict[str, Any]:
        """Which of the layers are built, and from what fresh objects of the same make are built."""
        return {
            name: {"built": built_in(thing), "config": keras_private.build_config(thing)}
            for name, thing in self.things.items()
            if isinstance(thing, keras.Layer)
        }

    def build(self, where: str, makes: Mapping[str, Any], optimizers: Mapping[str, Any]) -> None:
        """What is not built yet and was built there, from the shapes that the checkpoint knows."""
        layers = {name: thing for name, thing in self.things.items() if isinstance(thing, keras.Layer)}
        for name, layer in layers.items():
            make = makes.get(name, {"built": [True], "config": None})
            if keras_private.is_built(layer) or built_in(layer) == make["built"]:
                if not layer.built:
                    warn_of_unbuilt(where, name, layer)
                continue
            if make["config"] is None:
                raise ValueError(
                    f"{name} ({type(layer).__name__}) is not built, and the checkpoint {where} does not know the shapes of its inputs: "
                    f"Keras keeps none for it. Call it on one batch before you restore."
                )
            layer.build_from_config(make["config"])
        for name, optimizer in self._optimizers().items():
            built_for = optimizers.get(name, {}).get("of", ())
            if not optimizer.built and built_for and set(built_for) <= self.variables.keys():
                with keras_private.name_scope_of(optimizer):
                    optimizer.build([self.variables[variable] for variable in built_for])

    def optimizers(self) -> dict[str, Any]:
        """Their classes and settings, and what they are for, in JSON."""
        names = {id(variable): name for name, variable in self.variables.items()}
        return {
            name: described(optimizer)
            | {"of": [names.get(id(v)) for v in keras_private.weights_of(optimizer)] if optimizer.built else []}
            for name, optimizer in self._optimizers().items()
        }

    def _optimizers(self) -> dict[str, Any]:
        of_models = {f"{name}/optimizer": getattr(thing, "optimizer", None) for name, thing in self.things.items()}
        own = {name: thing for name, thing in self.things.items() if isinstance(thing, keras.optimizers.Optimizer)}
        return {
            name: optimizer for name, optimizer in (of_models | own).items() if isinstance(optimizer, keras.optimizers.Optimizer)
        }

    def policies(self) -> dict[str, list[str]]:
        """The precision of each layer, in order."""
        layers = {name: thing for name, thing in self.things.items() if isinstance(thing, keras.Layer)}
        return {name: [layer.dtype_policy.name for layer in keras_private.layers_of(thing)] for name, thing in layers.items()}

    def configuration(self) -> dict[str, Any]:
        """What the models were configured with, in JSON."""
        models = {name: thing for name, thing in self.things.items() if isinstance(thing, keras.Model)}
        return {name: configuration.of_model(thing) for name, thing in models.items()}

    def names_of(self, name: str, names: Iterable[str]) -> set[str]:
        """Those of variables that the fingerprint of one of the objects is made of."""
        of_thing = {n for n in names if n == name or n.startswith(f"{name}/")}
        of_metrics = f"{name}/metrics/" if isinstance(self.things[name], keras.Model) else None
        return {n for n in of_thing if of_metrics is None or not n.startswith(of_metrics)}

    def is_whole(self, name: str, theirs: Collection[str]) -> bool:
        """Whether one of the objects has the variables that a checkpoint has of it."""
        return self.names_of(name, theirs) == self.names_of(name, self.variables)

    def fingerprint(self, name: str) -> Callable[[Mapping[str, np.ndarray]], str]:
        """What gives `un.fingerprint` of one of the objects from all arrays, at any time and in any thread."""
        contents = Contents([self.things[name]])
        names = {id(variable): of for of, variable in self.variables.items()}
        return lambda arrays: contents.digest(lambda variable: arrays[names[id(variable)]])


def all_variables(thing: Any) -> list[Any]:
    if isinstance(thing, keras.Model):
        return keras_private.all_variables(thing)
    return [thing] if isinstance(thing, keras.Variable) else list(thing.variables)


def built_in(layer: Any) -> list[bool]:
    """Of the layer, and of all in it."""
    return [bool(one.built) for one in keras_private.layers_of(layer)]


def warn_of_unbuilt(where: str, name: str, layer: Any) -> None:
    warnings.warn(
        f"{name} ({type(layer).__name__}) was not built when the checkpoint {where} was saved, which therefore holds no weights of it, and "
        f"it is not built now: its weights will be drawn anew. Call it on one batch before you save.",
        stacklevel=6,
    )


def without_unbuilt_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """What is left on both sides, and the models here whose metrics are to begin anew.

    A model has some metrics only when it was compiled or has had its first batch, and a loop may never give it one.
    """
    fresh = set()
    for name in {n.split("/")[0] for n in [*ours, *theirs]}:
        for group in keras_private.BUILT_LATER:
            of_ours, of_theirs = ([n for n in side if n.startswith(f"{name}/{group}/")] for side in (ours, theirs))
            if not of_ours or not of_theirs:
                ours = {n: v for n, v in ours.items() if n not in of_ours}
                theirs = {n: v for n, v in theirs.items() if n not in of_theirs}
                fresh |= {name} if of_ours else set()
    return ours, theirs, fresh


def described(optimizer: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(of) for key, of in value.items() if key not in ("name", "registered_name", "learning_rate")}
        return value if isinstance(value, bool | int | float | str | None) else str(value)

    return {"class": type(optimizer).__name__, "settings": plain(optimizer.get_config())}
