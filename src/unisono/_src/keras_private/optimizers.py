"""Attributes and variables of optimizers."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence

import keras
from keras.src import backend
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer as LossScaleOptimizer


def list_dead_attributes(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Return the attributes that were set on an optimizer, or on its inner optimizer, and that its class does not know."""
    known = _attributes.get(type(optimizer))
    if known is None:
        known = _attributes[type(optimizer)] = {name for cls in type(optimizer).__mro__ for name in list_known_names(cls)}
    inner = getattr(optimizer, "inner_optimizer", None)
    unknown = [name for name in vars(optimizer) if name not in known and not name.startswith("_")]
    return unknown if inner is None else unknown + list_dead_attributes(inner)


_attributes: dict[type, set[str]] = {}


def list_known_names(cls: type) -> set[str]:
    """Return the names of a class, and the names that its methods use as attributes."""
    codes = [function.__code__ for function in vars(cls).values() if isinstance(function, types.FunctionType)]
    return {name for code in codes for name in code.co_names} | set(vars(cls))


def read_optimizer_settings(optimizer: keras.optimizers.Optimizer) -> dict[str, bool | int | float | str | None]:
    """Return an optimizer's attributes: numbers and texts as they are, and everything else by identity."""
    settings = {name: value if isinstance(value, NUMBERS) else id(value) for name, value in vars(optimizer).items()}
    inner = getattr(optimizer, "inner_optimizer", None)
    return (
        settings
        if inner is None
        else settings | {f"inner {name}": value for name, value in read_optimizer_settings(inner).items()}
    )


NUMBERS = (bool, int, float, str, type(None))


def list_optimizer_weights(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that the optimizer was built for."""
    return list(optimizer._trainable_variables)


def open_name_scope(optimizer: keras.optimizers.Optimizer) -> contextlib.AbstractContextManager[object]:
    """Return the name scope in which Keras builds the optimizer."""
    return backend.name_scope(optimizer.name, caller=optimizer)


def check_known_variables(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Refuse, as Keras does, variables that the optimizer was not built for."""
    optimizer._check_variables_are_known(variables)


def list_updated_ids(optimizer: keras.optimizers.Optimizer) -> set[int]:
    """Return the ids of the optimizer's own variables that an update changes: all except the learning rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return {id(variable) for variable in optimizer.variables if variable is not getattr(inner, "_learning_rate", None)}
