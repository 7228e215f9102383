"""What optimizers hold."""

from __future__ import annotations

import types
from typing import Any

from keras.src import backend


def dead_attributes(optimizer: Any) -> list[str]:
    """Attributes that somebody has set on an optimizer, or on the one inside of it, and that it does not have."""
    known = _attributes.get(type(optimizer))
    if known is None:
        known = _attributes[type(optimizer)] = {name for of in type(optimizer).__mro__ for name in names_set_by(of)}
    inner = getattr(optimizer, "inner_optimizer", None)
    found = [name for name in vars(optimizer) if name not in known and not name.startswith("_")]
    return found if inner is None else found + dead_attributes(inner)


_attributes: dict[type, set[str]] = {}


def names_set_by(of: type) -> set[str]:
    """The names that the methods of a class use as attributes, and those of the class."""
    codes = [f.__code__ for f in vars(of).values() if isinstance(f, types.FunctionType)]
    return {name for code in codes for name in code.co_names} | set(vars(of))


def settings_of(optimizer: Any) -> dict[str, Any]:
    """An optimizer's attributes, numbers as they are and everything else by identity."""
    found = {name: value if isinstance(value, NUMBERS) else id(value) for name, value in vars(optimizer).items()}
    inner = getattr(optimizer, "inner_optimizer", None)
    return found if inner is None else found | {f"inner {name}": value for name, value in settings_of(inner).items()}


NUMBERS = (bool, int, float, str, type(None))


def weights_of(optimizer: Any) -> list[Any]:
    """The variables that the optimizer was built for."""
    return list(optimizer._trainable_variables)


def name_scope_of(optimizer: Any) -> Any:
    """In which the optimizer is built."""
    return backend.name_scope(optimizer.name, caller=optimizer)


def check_known(optimizer: Any, variables: list[Any]) -> None:
    """Raises, as Keras does, for variables that the optimizer was not built for."""
    optimizer._check_variables_are_known(variables)


def updated_by(optimizer: Any) -> set[int]:
    """The ids of the optimizer's own variables that an update changes: all but the learning rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return {id(v) for v in optimizer.variables if v is not getattr(inner, "_learning_rate", None)}
