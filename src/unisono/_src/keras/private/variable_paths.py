"""The paths of layers and variables in a model, and the layers that live."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import keras
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.saving.saving_lib import _get_unique_name as unique_name
from keras.src.saving.saving_lib import _walk_saveable as children_of
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.utils.naming import to_snake_case

from unisono._src.keras.private.compiled_losses import get_loss_tracker, list_term_trackers

Named: TypeAlias = Iterator[tuple[str, keras.Variable]]
"""Variables with their names."""

Owner: TypeAlias = keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric
"""An object of Keras that holds variables."""

Container: TypeAlias = list[object] | tuple[object, ...] | dict[str, object]
"""An attribute of a layer that holds other objects."""


def walk_variables(thing: Owner | keras.Variable, path: str) -> Named:
    """Yield (name, variable) of a Keras object.

    It is a variable, a metric, an optimizer, a layer, or a model with its optimizer and metrics.
    """
    if isinstance(thing, keras.Variable):
        yield path, thing
        return
    seen: set[int] = set()
    names: set[str] = set()
    for name, variable in walk_in_order(thing, path):
        if id(variable) not in seen:
            seen.add(id(variable))
            while name in names:  # an attribute of the user's may have the name of one of our groups
                name += "'"
            names.add(name)
            yield name, variable


def walk_in_order(thing: Owner, path: str) -> Named:
    """Yield (name, variable) of an object, in order. A variable or a name may come twice."""
    if not isinstance(thing, keras.Model):
        yield from walk_saveable(thing, path, set())
        yield from number_variables(thing.variables, f"{path}/others")
        return
    optimizer = getattr(thing, "optimizer", None)
    visited = {id(optimizer), *map(id, thing.metrics)}
    yield from walk_saveable(thing, path, visited)
    yield from number_variables(
        thing.variables, f"{path}/others"
    )  # variables of layers in places where Keras' saving does not look
    if optimizer is not None:
        yield from walk_in_order(optimizer, f"{path}/optimizer")
    yield from walk_metrics(thing, path)


BUILT_LATER = ("metrics/loss", "metrics/compiled")
"""Metrics that a model has only after compile(), or after its first batch."""


def walk_metrics(model: keras.Model, path: str) -> Named:
    """Yield (name, variable) of a model's metrics.

    Each kind is numbered by itself, so that names do not change with the first batch.
    """
    tracker = get_loss_tracker(model)
    terms = list_term_trackers(model)
    kinds: dict[str, list[keras.Variable]] = {}
    for metric in model.metrics:
        is_compiled = isinstance(metric, CompileMetrics) or any(metric is term for term in terms)
        kind = "loss" if metric is tracker else "compiled" if is_compiled else "own"
        kinds.setdefault(kind, []).extend(metric.variables)
    for kind, variables in kinds.items():
        yield from number_variables(variables, f"{path}/metrics/{kind}")


def walk_saveable(thing: KerasSaveable, path: str, visited: set[int]) -> Named:
    if id(thing) in visited:
        return
    visited.add(id(thing))
    yield from walk_own_variables(thing, path)
    for attribute, child in children_of(thing):
        if isinstance(child, KerasSaveable):
            yield from walk_saveable(child, f"{path}/{attribute}", visited)
        elif isinstance(child, list | dict | tuple) and not isinstance(thing, keras.optimizers.Optimizer):
            yield from walk_container(child, f"{path}/{attribute}", visited, set())


def walk_container(container: Container, path: str, visited: set[int], outer: set[int]) -> Named:
    if id(container) in outer:
        return
    outer.add(id(container))
    used: dict[str, int] = {}
    for child in container.values() if isinstance(container, dict) else container:
        if isinstance(child, KerasSaveable):
            name = unique_name(to_snake_case(type(child).__name__), used)
            yield from walk_saveable(child, f"{path}/{name}", visited)
        elif isinstance(child, list | dict | tuple):
            yield from walk_container(child, f"{path}/{unique_name('container', used)}", visited, outer)


def walk_own_variables(thing: KerasSaveable, path: str) -> Named:
    """Yield (name, variable) of an object without its children."""
    if isinstance(thing, keras.Layer):
        yield from number_variables(thing._trainable_variables + thing._non_trainable_variables, path)
        yield from number_variables([generator.state for generator in thing._seed_generators], f"{path}/seeds")
    elif isinstance(thing, keras.optimizers.Optimizer):
        yield from number_variables(thing.variables, path)
    elif isinstance(thing, keras.metrics.Metric):
        yield from number_variables(thing._variables, path)


def number_variables(variables: Iterable[keras.Variable], path: str) -> Named:
    for index, variable in enumerate(variables):
        yield f"{path}/{index}", variable


TRANSFORMS = re.compile(
    r"\b(jvp|transpose|vmap|jit|checkpoint|rematted_computation|while|body|cond|branch_\d+_fun|closed_call)\b"
)
"""What JAX writes around the names of scopes."""


class LiveLayers:
    """The layers that live now, by their paths. A path goes from the model down, without the model's own name."""

    def __init__(self) -> None:
        layers = [thing for thing in gc.get_objects() if isinstance(thing, keras.layers.Layer)]
        self._models = {get_path(layer) for layer in layers if isinstance(layer, keras.Model)}
        inner = {self._strip_model(get_path(layer)): layer for layer in layers if not isinstance(layer, keras.Model)}
        self._paths = set(inner)
        self._owners: dict[str, str] = {}
        """The innermost layers of variables whose paths do not begin with theirs, as of the states of random numbers."""
        for path in sorted(inner, key=lambda path: path.count("/")):
            own = f"{get_path(inner[path])}/"
            self._owners |= {variable.path: path for variable in inner[path].variables if not variable.path.startswith(own)}

    def find_by_scopes(self, scopes: str) -> str | None:
        """Find the innermost layer in the scopes of a program. It is None if there is none but models."""
        return self._find_innermost([part for part in re.split(r"[/()]", TRANSFORMS.sub("", scopes)) if part])

    def find_by_variable(self, path: str) -> str | None:
        """Find the innermost layer that has a variable. It is None if there is none but models."""
        return self._find_innermost(path.split("/")) or self._owners.get(path)

    def _find_innermost(self, parts: list[str]) -> str | None:
        if parts and parts[0] in self._models:
            parts = parts[1:]
        # Layers that Keras never builds, as Dropout, have their name alone as their path, wherever they are.
        ends = (end for end in range(len(parts), 0, -1) if {"/".join(parts[:end]), parts[end - 1]} & self._paths)
        return next(("/".join(parts[:end]) for end in ends), None)

    def _strip_model(self, path: str) -> str:
        first, _, rest = path.partition("/")
        return rest if first in self._models and rest else path


def get_path(layer: keras.layers.Layer) -> str:
    return getattr(layer, "path", None) or layer.name
