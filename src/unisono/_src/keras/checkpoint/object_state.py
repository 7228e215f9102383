"""The state of Keras objects, by name, and its restoring. Names follow the structure of the objects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

import keras
import numpy as np

from unisono._src.keras.checkpoint import run_description
from unisono._src.keras.checkpoint.encoding import STATES
from unisono._src.keras.fingerprint import FingerprintContents
from unisono._src.keras.private.models import is_built, list_layers
from unisono._src.keras.private.optimizers import list_optimizer_weights, open_name_scope
from unisono._src.keras.private.trainer_state import list_model_variables, map_newest_values
from unisono._src.keras.private.variable_paths import BUILT_LATER, walk_variables
from unisono._src.typing import AnyArray, Json

KerasThing: TypeAlias = keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric | keras.Variable
"""A Keras object that has variables, or a variable."""


class KerasState:
    """The variables of some named objects."""

    def __init__(self, things: Mapping[str, KerasThing]) -> None:
        self.things = dict(things)
        self._layers = {name: thing for name, thing in things.items() if isinstance(thing, keras.Layer)}
        self._known: tuple[list[int], dict[str, keras.Variable]] = ([], {})

    @property
    def variables(self) -> dict[str, keras.Variable]:
        """The variables by name. A variable that two objects share is listed once."""
        ids = [id(variable) for name, thing in self.things.items() for variable in collect_variables(name, thing)]
        if ids != self._known[0]:  # a walk through a large model takes a while
            named: dict[int, tuple[str, keras.Variable]] = {}
            for name, thing in self.things.items():
                for path, variable in walk_variables(thing, name):
                    named.setdefault(id(variable), (path, variable))
            self._known = ids, dict(named.values())
        return self._known[1]

    @property
    def optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        return dict(pair for name, thing in self.things.items() for pair in find_optimizers(name, thing).items())

    def values(self) -> dict[str, AnyArray]:
        """Read the newest values of all variables.

        This works in a callback too, while a loop of Keras holds the values outside the model.
        """
        newest: dict[int, AnyArray] = {}
        for thing in self.things.values():
            if isinstance(thing, keras.Model):
                newest |= map_newest_values(thing)
        newest |= {id(variable): variable.value for variable in self.variables.values() if id(variable) not in newest}
        return {name: newest[id(variable)] for name, variable in self.variables.items()}

    def put(self, where: str, theirs: Mapping[str, np.ndarray], partial: bool = False) -> None:
        """Assign all variables from a checkpoint's arrays, or raise.

        If it raises because the arrays do not fit, none is assigned. With `partial`, there may be more arrays. The bits of each
        variable are compared with those assigned: it would train on with others.
        """
        ours = self.variables
        theirs = {name: array for name, array in theirs.items() if (name in ours if partial else not name.startswith(STATES))}
        ours, theirs, fresh = drop_unbuilt_metrics(ours, theirs)
        run_description.check_same_arrays(where, theirs, ours)
        for name in fresh:
            cast("keras.Model", self.things[name]).reset_metrics()
        for name, variable in ours.items():
            variable.assign(theirs[name])
        values = self.values()
        other = next((name for name in ours if np.asarray(values[name]).tobytes() != theirs[name].tobytes()), None)
        if other is not None:
            raise RuntimeError(
                f"{other.partition('/')[0]} was restored from the checkpoint {where}, and {other} has other bits now. Please report this with the "
                f"model that shows it; do not train on."
            )

    def describe(self) -> dict[str, Json]:
        """Describe in JSON what is built, and the settings that decide bits."""
        names = {id(variable): name for name, variable in self.variables.items()}
        return {
            "build": {
                name: {"built": list_built(layer), "config": layer.get_build_config()} for name, layer in self._layers.items()
            },
            "optimizers": {
                name: run_description.describe_optimizer(optimizer)
                | {"of": [names.get(id(weight)) for weight in list_optimizer_weights(optimizer)] if optimizer.built else []}
                for name, optimizer in self.optimizers.items()
            },
            "policies": {name: [inner.dtype_policy.name for inner in list_layers(layer)] for name, layer in self._layers.items()},
            "configuration": {
                name: run_description.describe_model(layer)
                for name, layer in self._layers.items()
                if isinstance(layer, keras.Model)
            },
        }

    def build(self, where: str, record: Mapping[str, Json]) -> list[str]:
        """Build what was built when the checkpoint was saved.

        Layers and optimizers are built from its shapes. The result is a list of warnings.
        """
        unbuilt = []
        for name, layer in self._layers.items():
            saved = record["build"].get(name, {"built": [True], "config": None})
            kind = type(layer).__name__
            if is_built(layer) or list_built(layer) == saved["built"]:
                if not layer.built:
                    unbuilt.append(
                        f"{name} ({kind}) was not built when the checkpoint {where} was saved, which therefore holds no weights of it, and it "
                        f"is not built now: its weights will be drawn anew. Call it on one batch before you save."
                    )
                continue
            if saved["config"] is None:
                raise ValueError(
                    f"{name} ({kind}) is not built, and the checkpoint {where} does not know the shapes of its inputs: Keras keeps none for it. "
                    f"Call it on one batch before you restore."
                )
            layer.build_from_config(saved["config"])
        for name, optimizer in self.optimizers.items():
            built_for = record["optimizers"].get(name, {}).get("of", ())
            if not optimizer.built and built_for and set(built_for) <= self.variables.keys():
                with open_name_scope(optimizer):
                    optimizer.build([self.variables[variable] for variable in built_for])
        return unbuilt

    def fingerprint(self, name: str) -> Callable[[Mapping[str, np.ndarray]], str]:
        """Make a function that computes `un.fingerprint` of the object.

        The function takes all arrays, at any time and in any thread.
        """
        contents = FingerprintContents([self.things[name]])
        names = {id(variable): path for path, variable in self.variables.items()}
        return lambda arrays: contents.digest(lambda variable: arrays[names[id(variable)]])


def collect_variables(name: str, thing: KerasThing) -> list[keras.Variable]:
    """Collect the variables of an object and of its optimizers. Some may come twice."""
    if isinstance(thing, keras.Variable):
        return [thing]
    own = list_model_variables(thing) if isinstance(thing, keras.Model) else thing.variables
    return own + [variable for optimizer in find_optimizers(name, thing).values() for variable in optimizer.variables]


def find_optimizers(name: str, thing: KerasThing) -> dict[str, keras.optimizers.Optimizer]:
    """Find the optimizers of an object, by name.

    It may be an optimizer, or a layer or model with optimizers as attributes. Names of variables begin with these names.
    """
    held = {f"{name}/{attribute}": value for attribute, value in vars(thing).items()} if isinstance(thing, keras.Layer) else {}
    return {path: value for path, value in {name: thing, **held}.items() if isinstance(value, keras.optimizers.Optimizer)}


def list_built(layer: keras.Layer) -> list[bool]:
    """List whether the layer and each layer in it are built."""
    return [bool(inner.built) for inner in list_layers(layer)]


def drop_unbuilt_metrics(
    ours: dict[str, keras.Variable], theirs: dict[str, np.ndarray]
) -> tuple[dict[str, keras.Variable], dict[str, np.ndarray], set[str]]:
    """Leave out metrics that one side lacks.

    The third result names the models here whose metrics begin anew. A model has some metrics only when it was compiled or has had
    its first batch, and a loop may never give it a batch.
    """
    fresh = set()
    for name, group in itertools.product({path.split("/")[0] for path in [*ours, *theirs]}, BUILT_LATER):
        our_group, their_group = ({path for path in side if path.startswith(f"{name}/{group}/")} for side in (ours, theirs))
        if our_group and not their_group:
            fresh.add(name)
        if not our_group or not their_group:
            ours = {path: variable for path, variable in ours.items() if path not in our_group}
            theirs = {path: array for path, array in theirs.items() if path not in their_group}
    return ours, theirs, fresh
