"""The variables of an exported model. They are described when it is written, and made again when it is loaded."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence

import keras
import numpy as np

from unisono._src.keras.private.trainer_state import map_newest_values
from unisono._src.keras.private.variable_paths import walk_variables
from unisono._src.keras.replica import random_keys
from unisono._src.typing import Json

CONSTRAINTS = {
    kind.__name__: kind
    for kind in (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.NonNeg, keras.constraints.UnitNorm)
}
"""The constraints that a file may name. A name from a file finds no other class."""


@dataclasses.dataclass(frozen=True)
class VariableDescription:
    """A variable without its value."""

    name: str
    """The name, by the variable's path in the model."""
    shape: Sequence[int]
    dtype: str
    trainable: bool
    seed: bool
    """Whether it is the state of a random generator."""
    aggregation: str
    overwrite_with_gradient: bool
    constraint: Sequence[Json] | None
    """The class and the configuration of the constraint."""


def describe_variables(model: keras.Model) -> tuple[list[keras.Variable], tuple[VariableDescription, ...]]:
    """List the model's variables with their descriptions.

    They are in the model's order, without the variables of optimizer and metrics.
    """
    paths = {id(variable): path for path, variable in walk_variables(model, "model")}
    trainable = {id(variable) for variable in model.trainable_variables}
    variables = list(model.variables)
    descriptions = tuple(
        VariableDescription(
            name_variable(paths[id(variable)], variable),
            tuple(variable.shape),
            variable.dtype,
            id(variable) in trainable,
            random_keys.is_seed_state(variable),
            variable.aggregation,
            bool(variable.overwrite_with_gradient),
            describe_constraint(variable),
        )
        for variable in variables
    )
    pairs = zip(descriptions, variables, strict=True)
    unconstrained = [described.name for described, variable in pairs if variable.constraint and not described.constraint]
    if unconstrained:
        warnings.warn(
            f"The constraint of {', '.join(unconstrained)} is of a class of your own, which a file cannot hold: the loaded model is trained without "
            f"it. Evaluation and prediction do not need it.",
            stacklevel=7,
        )
    return variables, descriptions


def name_variable(path: str, variable: keras.Variable) -> str:
    """Name the variable by its path and the user's own name."""
    place = ".".join(path.split("/")[1:])
    return place if re.fullmatch(r"variable(_\d+)?", variable.name) else f"{place}.{variable.name}"


def describe_constraint(variable: keras.Variable) -> tuple[str, dict[str, Json]] | None:
    """Describe the variable's constraint by class and configuration. None for a class of the user's."""
    kind = type(variable.constraint)
    return (kind.__name__, variable.constraint.get_config()) if CONSTRAINTS.get(kind.__name__) is kind else None


def read_values(model: keras.Model, variables: Sequence[keras.Variable]) -> list[np.ndarray]:
    """Read the newest values. This also works in a callback, while fit holds them outside the model."""
    newest = map_newest_values(model)
    return [np.array(newest[id(variable)]) for variable in variables]


def add_variable(layer: keras.Layer, described: VariableDescription, value: np.ndarray) -> keras.Variable:
    """Add the described variable to the layer, with this value."""
    variable = layer.add_weight(
        shape=described.shape,
        initializer=lambda shape, dtype=None: keras.ops.convert_to_tensor(value, dtype),
        dtype=described.dtype,
        trainable=described.trainable,
        autocast=False,  # the program casts where the model did
        aggregation=described.aggregation,
        overwrite_with_gradient=described.overwrite_with_gradient,
        name=described.name,
    )
    if described.constraint is not None:
        name, config = described.constraint
        variable.constraint = CONSTRAINTS[name](**config)
    return variable
