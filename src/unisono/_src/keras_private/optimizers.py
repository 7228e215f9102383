"""Attributes and variables of optimizers."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Sequence

import keras
from keras.src import backend
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer as LossScaleOptimizer


def list_dead_attributes(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Return the attributes that were set on an optimizer, or on its inner optimizer, and that its class does not know."""
    known = list_known_names(type(optimizer))
    inner = getattr(optimizer, "inner_optimizer", None)
    unknown = [name for name in vars(optimizer) if name not in known and not name.startswith("_")]
    return unknown if inner is None else unknown + list_dead_attributes(inner)


@functools.lru_cache
def list_known_names(cls: type) -> set[str]:
    """Return the names of a class and its bases, and the names that their methods use as attributes."""
    functions = [value for base in cls.__mro__ for value in vars(base).values() if isinstance(value, types.FunctionType)]
    return {name for function in functions for name in function.__code__.co_names} | {
        name for base in cls.__mro__ for name in vars(base)
    }


def list_optimizer_weights(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that the optimizer was built for."""
    return list(optimizer._trainable_variables)


def list_loss_scales(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the optimizer's variables that scale the loss: none but a loss scale."""
    return [optimizer.dynamic_scale] if isinstance(optimizer, LossScaleOptimizer) else []


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
