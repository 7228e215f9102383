"""The variables of an exported model: what is known of each, and how they are made again."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from unisono._src import keras_private
from unisono._src.replica import random_keys

CONSTRAINTS = {
    of.__name__: of
    for of in (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.NonNeg, keras.constraints.UnitNorm)
}
"""Those that a file may name; a name from a file finds no other class."""


@dataclasses.dataclass(frozen=True)
class Described:
    """A variable without its value."""

    name: str
    """By its place in the model."""
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    seed: bool
    """Whether it is the state of a random generator."""
    aggregation: str
    overwrite_with_gradient: bool
    constraint: tuple[str, dict[str, Any]] | None


def of_model(model: Any) -> tuple[list[Any], tuple[Described, ...]]:
    """(variables, what is known of them), in the model's order; not those of its optimizer and its metrics."""
    named = {id(variable): name for name, variable in keras_private.variables_by_structure(model, "model")}
    variables = list(model.variables)
    trainable = {id(variable) for variable in model.trainable_variables}
    names = [place(named[id(v)], v) for v in variables]
    found = [described(v, name, id(v) in trainable) for v, name in zip(variables, names, strict=True)]
    left = [of.name for of, v in zip(found, variables, strict=True) if v.constraint is not None and of.constraint is None]
    if left:
        warnings.warn(
            f"The constraint of {', '.join(left)} is of a class of your own, which a file cannot hold: the loaded model is trained without "
            f"it. Evaluation and prediction do not need it.",
            stacklevel=5,
        )
    return variables, tuple(found)


def place(path: str, variable: Any) -> str:
    """The variable's place in the model, and its name unless that was given automatically; as a name of a variable."""
    parts = path.split("/")[1:]
    if not re.fullmatch(r"variable(_\d+)?", variable.name):
        parts = [*parts[:-1], f"{parts[-1]}.{variable.name}"]
    return ".".join(parts)


def described(variable: Any, name: str, trainable: bool) -> Described:
    constraint = variable.constraint
    known = CONSTRAINTS.get(type(constraint).__name__) is type(constraint)
    return Described(
        name,
        tuple(variable.shape),
        variable.dtype,
        trainable,
        random_keys.is_seed(variable),
        variable.aggregation,
        bool(variable.overwrite_with_gradient),
        (type(constraint).__name__, constraint.get_config()) if known else None,
    )


def values(model: Any, variables: Sequence[Any]) -> list[np.ndarray]:
    """The newest ones, also in a callback, while fit holds them outside of the model."""
    newest = keras_private.newest_values(model)
    return [np.array(newest[id(variable)]) for variable in variables]


def made(layer: Any, of: Described, value: np.ndarray) -> Any:
    """A variable of the layer."""
    variable = layer.add_weight(
        shape=of.shape,
        initializer=lambda shape, dtype=None: keras.ops.convert_to_tensor(value, dtype),
        dtype=of.dtype,
        trainable=of.trainable,
        autocast=False,  # the program casts where the model did
        aggregation=of.aggregation,
        overwrite_with_gradient=of.overwrite_with_gradient,
        name=of.name,
    )
    if of.constraint is not None:
        name, config = of.constraint
        variable.constraint = CONSTRAINTS[name](**config)
    return variable
