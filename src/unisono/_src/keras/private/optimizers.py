"""Attributes and variables of optimizers."""

from __future__ import annotations

import contextlib
import difflib
import functools
import types
from collections.abc import Sequence

import keras
from keras.src import backend
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer as LossScaleOptimizer
from keras.src.optimizers.schedules.learning_rate_schedule import LearningRateSchedule

from unisono._src.typing import KerasObject

PLAIN_TYPES = frozenset({bool, int, float, str, bytes, type(None)})
SETTING_HOLDERS = (BaseOptimizer, LearningRateSchedule)
MAY_HOLD_SETTINGS = (list, tuple, dict, *SETTING_HOLDERS)


def read_attributes(holder: KerasObject, seen: frozenset[int] = frozenset()) -> dict[str, object]:
    """Read the attributes of an optimizer, with those of inner ones.

    Inner ones are the optimizers and schedules that it holds. Numbers and texts are read by value, everything else by identity. A tuple
    with the object itself keeps the object alive, so that no other one gets its id; Python never compares the objects.
    """
    seen |= {id(holder)}
    attributes: dict[str, object] = {}
    for name, value in vars(holder).items():
        attributes[name] = value
        if type(value) not in PLAIN_TYPES:
            parts = list_holders(value) if isinstance(value, MAY_HOLD_SETTINGS) else ()
            attributes[name] = id(value), value, parts and [read_attributes(part, seen) for part in parts if id(part) not in seen]
    return attributes


def read_optimizer_settings(model: keras.Model) -> list[dict[str, object]]:
    """Read the settings of all optimizers that a model holds.

    The one of `compile`, and others, as the model of a GAN has them.
    """
    return [read_attributes(part) for value in vars(model).values() for part in list_holders(value)]


def list_holders(value: object) -> list[KerasObject]:
    """List the optimizers and schedules that an attribute holds.

    `LossScaleOptimizer` and `MultiOptimizer` hold others so.

    A collection is looked through if its first item is one: all others are as long as the list of weights, and this is asked in every step.
    """
    if isinstance(value, SETTING_HOLDERS):
        return [value]
    items = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
    if not items or not isinstance(next(iter(items)), SETTING_HOLDERS):
        return []
    return [item for item in items if isinstance(item, SETTING_HOLDERS)]


def list_optimizers(holder: keras.Model | keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """List an optimizer itself, or the optimizers that a model holds."""
    values = [holder] if isinstance(holder, keras.optimizers.Optimizer) else list(vars(holder).values())
    return [part for value in values for part in list_holders(value) if isinstance(part, keras.optimizers.Optimizer)]


OLD_SETTINGS = ("lr", "decay")
"""Names of settings in earlier versions of Keras."""


def list_dead_settings(optimizer: KerasObject, seen: frozenset[int] = frozenset()) -> list[str]:
    """List attributes of an optimizer that look like settings and do nothing.

    They have the name of an old setting, or nearly the name of a setting. Inner optimizers count too. Other attributes that the class does
    not know are the user's own notes.
    """
    known = list_known_names(type(optimizer))
    seen |= {id(optimizer)}
    own = [name for name in vars(optimizer) if name not in known and not name.startswith("_")]
    settings = ["learning_rate", *[name for name in vars(optimizer) if name in known]] if own else []
    dead = [name for name in own if is_like_setting(name, settings)]
    for value in vars(optimizer).values():
        for part in list_holders(value) if isinstance(value, MAY_HOLD_SETTINGS) else ():
            if isinstance(part, BaseOptimizer) and id(part) not in seen:
                dead += list_dead_settings(part, seen)
    return dead


def is_like_setting(name: str, settings: Sequence[str]) -> bool:
    """Whether an attribute was probably meant to be a setting.

    A setting with a word before or behind it is another name.

    >>> [is_like_setting(name, ["learning_rate", "clipnorm"]) for name in ("lr", "clip_norm", "learning_rates", "max_learning_rate")]
    [True, True, True, False]
    """
    close = difflib.get_close_matches(name, settings, n=3, cutoff=0.85)
    longer = [one for one in close if name.endswith(f"_{one.lstrip(chr(95))}") or name.startswith(f"{one}_")]
    return name in OLD_SETTINGS or len(close) > len(longer)


@functools.lru_cache
def list_known_names(cls: type) -> set[str]:
    """List the attribute names that a class and its methods know. Its bases count too."""
    functions = [value for base in cls.__mro__ for value in vars(base).values() if isinstance(value, types.FunctionType)]
    return {name for function in functions for name in function.__code__.co_names} | {
        name for base in cls.__mro__ for name in vars(base)
    }


def list_optimizer_weights(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """List the variables that the optimizer was built for."""
    return list(optimizer._trainable_variables)


def list_loss_scales(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """List the optimizer's variables that scale the loss. Only a `LossScaleOptimizer` has one."""
    return [optimizer.dynamic_scale] if isinstance(optimizer, LossScaleOptimizer) else []


def open_name_scope(optimizer: keras.optimizers.Optimizer) -> contextlib.AbstractContextManager[object]:
    """Open the name scope in which Keras builds the optimizer."""
    return backend.name_scope(optimizer.name, caller=optimizer)


def check_known_variables(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Refuse variables that the optimizer was not built for. Keras refuses them too."""
    optimizer._check_variables_are_known(variables)


def list_updated_ids(optimizer: keras.optimizers.Optimizer) -> set[int]:
    """List the ids of optimizer variables that an update changes. These are all except the learning rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return {id(variable) for variable in optimizer.variables if variable is not getattr(inner, "_learning_rate", None)}
