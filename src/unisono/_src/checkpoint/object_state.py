"""The state of Keras objects, by names that follow their structure, and how it is restored."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeAlias, TypedDict, cast

import keras
import numpy as np

from unisono._src.checkpoint import compatibility, configuration
from unisono._src.fingerprint import FingerprintContents
from unisono._src.keras_private.models import is_built, list_layers
from unisono._src.keras_private.optimizers import list_optimizer_weights, open_name_scope
from unisono._src.keras_private.trainer_state import list_model_variables, map_newest_values
from unisono._src.keras_private.variable_paths import BUILT_LATER, get_build_config, walk_variables
from unisono._src.typing import AnyArray, Config, Json

KerasThing: TypeAlias = keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric | keras.Variable
"""A Keras object that has variables, or a variable."""

KINDS = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable)


class LayerBuild(TypedDict):
    """The layers of an object that are built, and the shapes for which they were built."""

    built: list[bool]
    """One value for each layer in the object."""
    config: Config | None
    """The shapes, as Keras keeps them; None where Keras keeps none."""


class KerasState:
    """The variables of some named objects."""

    def __init__(self, things: Mapping[str, KerasThing]) -> None:
        self.things = dict(things)
        self._known: tuple[list[int], dict[str, keras.Variable]] = ([], {})

    @property
    def variables(self) -> dict[str, keras.Variable]:
        """Return the variables by name; a variable that two objects share is listed once."""
        ids = [id(variable) for thing in self.things.values() for variable in collect_variables(thing)]
        if ids != self._known[0]:  # a walk through a large model takes a while
            named: dict[int, tuple[str, keras.Variable]] = {}
            for name, thing in self.things.items():
                for path, variable in walk_variables(thing, name):
                    named.setdefault(id(variable), (path, variable))
            self._known = ids, dict(named.values())
        return self._known[1]

    def values(self) -> dict[str, AnyArray]:
        """Return the newest values, also in a callback, while a loop of Keras holds them outside the model."""
        newest: dict[int, AnyArray] = {}
        for thing in self.things.values():
            if isinstance(thing, keras.Model):
                newest |= map_newest_values(thing)
        newest |= {id(variable): variable.value for variable in self.variables.values() if id(variable) not in newest}
        return {name: newest[id(variable)] for name, variable in self.variables.items()}

    def put(self, where: str, theirs: Mapping[str, np.ndarray], partial: bool = False) -> None:
        """Assign all variables, or raise and assign none. With `partial`, the checkpoint may have more arrays."""
        ours = self.variables
        theirs = {name: array for name, array in theirs.items() if name in ours} if partial else dict(theirs)
        ours, theirs, fresh = drop_unbuilt_metrics(ours, theirs)
        compatibility.check_same_arrays(where, theirs, ours)
        for name in fresh:
            cast("keras.Model", self.things[name]).reset_metrics()
        for name, variable in ours.items():
            variable.assign(theirs[name])

    def describe_builds(self) -> dict[str, LayerBuild]:
        """Return which layers are built, and for which shapes."""
        return {
            name: {"built": list_built(thing), "config": get_build_config(thing)}
            for name, thing in self.things.items()
            if isinstance(thing, keras.Layer)
        }

    def build(self, where: str, makes: Mapping[str, LayerBuild], optimizers: Mapping[str, Mapping[str, Json]]) -> None:
        """Build, from the shapes in the checkpoint, the layers and optimizers that were built when it was saved."""
        layers = {name: thing for name, thing in self.things.items() if isinstance(thing, keras.Layer)}
        for name, layer in layers.items():
            saved = makes.get(name, {"built": [True], "config": None})
            if is_built(layer) or list_built(layer) == saved["built"]:
                if not layer.built:
                    warn_of_unbuilt(where, name, layer)
                continue
            if saved["config"] is None:
                raise ValueError(
                    f"{name} ({type(layer).__name__}) is not built, and the checkpoint {where} does not know the shapes of its inputs: "
                    f"Keras keeps none for it. Call it on one batch before you restore."
                )
            layer.build_from_config(saved["config"])
        for name, optimizer in self._find_optimizers().items():
            built_for = optimizers.get(name, {}).get("of", ())
            if not optimizer.built and built_for and set(built_for) <= self.variables.keys():
                with open_name_scope(optimizer):
                    optimizer.build([self.variables[variable] for variable in built_for])

    def optimizers(self) -> dict[str, dict[str, Json]]:
        """Return the class, the settings and the trained variables of each optimizer, in JSON."""
        names = {id(variable): name for name, variable in self.variables.items()}
        return {
            name: describe_optimizer(optimizer)
            | {"of": [names.get(id(weight)) for weight in list_optimizer_weights(optimizer)] if optimizer.built else []}
            for name, optimizer in self._find_optimizers().items()
        }

    def _find_optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        of_models = {f"{name}/optimizer": getattr(thing, "optimizer", None) for name, thing in self.things.items()}
        own = {name: thing for name, thing in self.things.items() if isinstance(thing, keras.optimizers.Optimizer)}
        return {
            name: optimizer for name, optimizer in (of_models | own).items() if isinstance(optimizer, keras.optimizers.Optimizer)
        }

    def list_policies(self) -> dict[str, list[str]]:
        """Return the precision of each layer, in order."""
        layers = {name: thing for name, thing in self.things.items() if isinstance(thing, keras.Layer)}
        return {name: [layer.dtype_policy.name for layer in list_layers(thing)] for name, thing in layers.items()}

    def describe_configurations(self) -> dict[str, dict[str, Json]]:
        """Return the configuration of each model, in JSON."""
        models = {name: thing for name, thing in self.things.items() if isinstance(thing, keras.Model)}
        return {name: configuration.describe_configuration(thing) for name, thing in models.items()}

    def select_names(self, name: str, names: Iterable[str]) -> set[str]:
        """Return the names of one object's variables, without a model's metrics, which no fingerprint covers."""
        own = {variable for variable in names if variable == name or variable.startswith(f"{name}/")}
        metrics_prefix = f"{name}/metrics/" if isinstance(self.things[name], keras.Model) else None
        return {variable for variable in own if metrics_prefix is None or not variable.startswith(metrics_prefix)}

    def has_all_variables(self, name: str, theirs: Collection[str]) -> bool:
        """Return whether the object has exactly the variables that the checkpoint has of it."""
        return self.select_names(name, theirs) == self.select_names(name, self.variables)

    def fingerprint(self, name: str) -> Callable[[Mapping[str, np.ndarray]], str]:
        """Return a function that makes `un.fingerprint` of the object from all arrays, at any time and in any thread."""
        contents = FingerprintContents([self.things[name]])
        names = {id(variable): path for path, variable in self.variables.items()}
        return lambda arrays: contents.digest(lambda variable: arrays[names[id(variable)]])


def collect_variables(thing: KerasThing) -> list[keras.Variable]:
    if isinstance(thing, keras.Model):
        return list_model_variables(thing)
    return [thing] if isinstance(thing, keras.Variable) else list(thing.variables)


def list_built(layer: keras.Layer) -> list[bool]:
    """Return whether the layer is built, and each layer in it."""
    return [bool(inner.built) for inner in list_layers(layer)]


def warn_of_unbuilt(where: str, name: str, layer: keras.Layer) -> None:
    warnings.warn(
        f"{name} ({type(layer).__name__}) was not built when the checkpoint {where} was saved, which therefore holds no weights of it, and "
        f"it is not built now: its weights will be drawn anew. Call it on one batch before you save.",
        stacklevel=6,
    )


def drop_unbuilt_metrics(
    ours: dict[str, keras.Variable], theirs: dict[str, np.ndarray]
) -> tuple[dict[str, keras.Variable], dict[str, np.ndarray], set[str]]:
    """Return both sides without metrics that one side lacks, and the names of the models here whose metrics begin anew.

    A model has some metrics only when it was compiled or has had its first batch, and a loop may never give it a batch.
    """
    fresh = set()
    for name in {path.split("/")[0] for path in [*ours, *theirs]}:
        for group in BUILT_LATER:
            our_group, their_group = ([path for path in side if path.startswith(f"{name}/{group}/")] for side in (ours, theirs))
            if not our_group or not their_group:
                ours = {path: variable for path, variable in ours.items() if path not in our_group}
                theirs = {path: array for path, array in theirs.items() if path not in their_group}
                fresh |= {name} if our_group else set()
    return ours, theirs, fresh


def describe_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Json]:
    """Return the class and the settings of an optimizer, in JSON."""

    def simplify(value: object) -> Json:
        if isinstance(value, dict):
            return {
                str(key): simplify(inner)
                for key, inner in value.items()
                if key not in ("name", "registered_name", "learning_rate")
            }
        return value if isinstance(value, bool | int | float | str | None) else str(value)

    return {"class": type(optimizer).__name__, "settings": simplify(optimizer.get_config())}
