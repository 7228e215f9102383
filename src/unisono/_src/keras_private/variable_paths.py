"""Variables by the structure of what holds them, as Keras' saving names them: never by automatic names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.saving.saving_lib import _get_unique_name as unique_name
from keras.src.saving.saving_lib import _walk_saveable as children_of
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.utils.naming import to_snake_case

from unisono._src.keras_private.compiled_losses import loss_tracker, term_trackers

Named = Iterator[tuple[str, Any]]


def variables_by_structure(thing: Any, path: str) -> Named:
    """(name, variable) of a model, with its optimizer and metrics, a layer, an optimizer, a metric or a variable."""
    if isinstance(thing, keras.Variable):
        yield path, thing
        return
    seen: set[int] = set()
    names: set[str] = set()
    for name, variable in in_order(thing, path):
        if id(variable) not in seen:
            seen.add(id(variable))
            while name in names:  # an attribute of the user's may be called as one of our groups
                name += "'"
            names.add(name)
            yield name, variable


def in_order(thing: Any, path: str) -> Named:
    if not isinstance(thing, keras.Model):
        yield from of_saveable(thing, path, set())
        yield from numbered(thing.variables, f"{path}/others")
        return
    optimizer = getattr(thing, "optimizer", None)
    visited = {id(optimizer), *map(id, thing.metrics)}
    yield from of_saveable(thing, path, visited)
    yield from numbered(thing.variables, f"{path}/others")  # what layers keep where Keras' saving does not look
    if optimizer is not None:
        yield from in_order(optimizer, f"{path}/optimizer")
    yield from of_metrics(thing, path)


BUILT_LATER = ("metrics/loss", "metrics/compiled")
"""The metrics of a model that it has only when it was compiled, or had its first batch."""


def of_metrics(model: Any, path: str) -> Named:
    """Each kind has numbers of its own, so that the others are called the same before and after the first batch."""
    tracker, terms = loss_tracker(model), term_trackers(model)
    kinds: dict[str, list[Any]] = {}
    for metric in model.metrics:
        of_compile = isinstance(metric, CompileMetrics) or any(metric is term for term in terms)
        kind = "loss" if metric is tracker else "compiled" if of_compile else "own"
        kinds.setdefault(kind, []).extend(metric.variables)
    for kind, variables in kinds.items():
        yield from numbered(variables, f"{path}/metrics/{kind}")


def of_saveable(thing: Any, path: str, visited: set[int]) -> Named:
    if id(thing) in visited:
        return
    visited.add(id(thing))
    yield from own_variables(thing, path)
    for attribute, child in children_of(thing):
        if isinstance(child, KerasSaveable):
            yield from of_saveable(child, f"{path}/{attribute}", visited)
        elif isinstance(child, list | dict | tuple) and not isinstance(thing, keras.optimizers.Optimizer):
            yield from of_container(child, f"{path}/{attribute}", visited, set())


def of_container(container: Any, path: str, visited: set[int], outer: set[int]) -> Named:
    if id(container) in outer:
        return
    outer.add(id(container))
    used: dict[str, int] = {}
    for child in container.values() if isinstance(container, dict) else container:
        if isinstance(child, KerasSaveable):
            name = unique_name(to_snake_case(type(child).__name__), used)
            yield from of_saveable(child, f"{path}/{name}", visited)
        elif isinstance(child, list | dict | tuple):
            yield from of_container(child, f"{path}/{unique_name('container', used)}", visited, outer)


def own_variables(thing: Any, path: str) -> Named:
    """Those that are not a child's."""
    if isinstance(thing, keras.Layer):
        yield from numbered(thing._trainable_variables + thing._non_trainable_variables, path)
        yield from numbered([generator.state for generator in thing._seed_generators], f"{path}/seeds")
    elif isinstance(thing, keras.optimizers.Optimizer):
        yield from numbered(thing.variables, path)
    elif isinstance(thing, keras.metrics.Metric):
        yield from numbered(thing._variables, path)


def numbered(variables: Any, path: str) -> Named:
    for index, variable in enumerate(variables):
        yield f"{path}/{index}", variable


def build_config(thing: Any) -> Any:
    """From which a fresh object of the same make is built; None where Keras does not know."""
    return thing.get_build_config() if hasattr(thing, "get_build_config") else None
