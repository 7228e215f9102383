"""The state that Keras' loops hold, and scopes of a state."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from types import CodeType
from typing import TypeAlias

import keras
from jax import Array
from jax.sharding import Sharding
from keras.src import backend

from unisono._src.keras.private.instances import set_untracked
from unisono._src.typed_jax import device_put
from unisono._src.typing import AnyArray, Values

State: TypeAlias = tuple[Values, ...]
"""Values of variables, a list for each group."""

STATE_NAMES = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
WITHOUT_OPTIMIZER = tuple(name for name in STATE_NAMES if name != "optimizer_variables")


def hold_state(model: keras.Model, names: tuple[str, ...], state: State) -> None:
    """Keep a state on the model, where callbacks read it. The model returns to it when the loop ends, however it ends."""
    set_untracked(model, "_jax_state", dict(zip(names, state, strict=True)))
    set_untracked(model, "_jax_state_synced", False)


def take_state(model: keras.Model, purge: bool, **groups: bool) -> State:
    """Take the model's state as lists of arrays.

    Keras takes it in the same way, but here the state is stored somewhere at every moment. Keras empties the variables first: an interrupt
    at this moment would leave a model without weights. An array that two variables share, such as weights that were overwritten by their
    averages, is copied, because the memory of the state is used again.
    """
    names = [name for name in STATE_NAMES if groups.get(name)]
    variables = group_variables(model)
    times_held = collections.Counter(id(variable._value) for group in variables.values() for variable in group)

    def take_value(variable: keras.Variable) -> Array:
        return variable.value.copy() if times_held[id(variable._value)] > 1 else variable.value

    state = tuple([take_value(variable) for variable in variables[name]] for name in names)
    if purge:
        model._jax_state = dict(zip(names, state, strict=True))
        model._jax_state_synced = False
        model._purge_model_variables(**groups)
    return state


def group_variables(model: keras.Model) -> dict[str, list[keras.Variable]]:
    """Group the model's variables by the names of Keras' groups."""
    optimizer = getattr(model, "optimizer", None)
    return {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": optimizer.variables if optimizer is not None else [],
        "metrics_variables": model.metrics_variables,
    }


def list_variable_ids(model: keras.Model) -> list[int]:
    """List the ids of the trainable variables, then of the others. Their counts alone do not tell which variables are trained."""
    return [id(variable) for group in (model.trainable_variables, model.non_trainable_variables) for variable in group]


def get_held_state(model: keras.Model) -> dict[str, Values]:
    """Get the state that a loop holds outside of the variables. Empty if no loop holds one."""
    return model._jax_state if getattr(model, "_jax_state", None) and not model._jax_state_synced else {}


WRITE_BACK = next(name for name in ("state_sync", "jax_state_sync") if hasattr(keras.Model, name))
"""Keras' method that writes a loop's state into the variables. Keras 3.16 has it under the first name; the second calls it there."""


def write_back_state(model: keras.Model) -> None:
    """Write the state of a running loop into the variables. Keras does so before it saves, in a callback of fit."""
    getattr(model, WRITE_BACK)()


def is_write_back(code: CodeType) -> bool:
    """Whether this is Keras' function that writes a loop's state back. It writes to the variables."""
    return code is getattr(keras.Model, WRITE_BACK).__code__


def map_newest_values(model: keras.Model) -> dict[int, Array]:
    """Map the ids of variables to their newest values. This also works in a callback, while a loop holds the values."""
    held = get_held_state(model)
    newest: dict[int, Array] = {}
    for name, variables in group_variables(model).items():
        values = held.get(name) or [variable.value for variable in variables]
        newest |= zip(map(id, variables), values, strict=True)
    return newest


def has_value(variable: keras.Variable) -> bool:
    """Whether the variable holds its value. It does not while a loop of Keras holds the value."""
    return variable._value is not None


def find_stateless_scope() -> keras.StatelessScope | None:
    """Find the innermost StatelessScope around this line. None if there is none."""
    return backend.get_stateless_scope() if backend.in_stateless_scope() else None


def list_model_variables(model: keras.Model) -> list[keras.Variable]:
    """List the variables of the model, its optimizer and its metrics."""
    return [variable for group in group_variables(model).values() for variable in group]


def get_raw_value(variable: keras.Variable) -> Array:
    """The variable's array, in the variable's dtype."""
    return variable._value


def get_raw_values(variables: Sequence[keras.Variable]) -> list[Array]:
    """The variables' arrays, in the variables' dtypes."""
    return [variable._value for variable in variables]


def set_raw_values(variables: Sequence[keras.Variable], values: Sequence[Array]) -> None:
    """Set the variables' arrays, of unchanged shapes and dtypes. The new arrays were computed from the old ones."""
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


def place_value(variable: keras.Variable, sharding: Sharding | None) -> None:
    """Move a variable's value, and let it stay so when it is assigned. None lets the next value lie where it is made."""
    variable._layout = sharding
    if sharding is not None and has_value(variable):
        variable._value = device_put(variable._value, sharding)


def find_layout(variable: keras.Variable) -> object:
    """Find how a variable's values are to lie on devices. None if nothing is said of it."""
    return variable._layout


class RecordingScope(keras.StatelessScope):
    """A StatelessScope that records assigned variables. Variables outside of its mapping count too."""

    def __init__(self, state_mapping: Sequence[tuple[keras.Variable, AnyArray]], **options: bool) -> None:
        super().__init__(state_mapping=state_mapping, **options)
        self.assigned: dict[int, keras.Variable] = {}
        self._used: set[int] = set()
        """The ids of variables that were read before they were assigned."""

    def add_update(self, update: tuple[keras.Variable, Array]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Array | None:
        if id(variable) not in self.assigned:
            self._used.add(id(variable))
        return super().get_current_value(variable)

    @property
    def replaced(self) -> set[int]:
        """The ids of variables that were assigned without being read first. `assign_add` reads."""
        return self.assigned.keys() - self._used


class ReadingScope(RecordingScope):
    """A RecordingScope that also records read variables."""

    def __init__(self, state_mapping: Sequence[tuple[keras.Variable, AnyArray]] = (), **options: bool) -> None:
        super().__init__(state_mapping=list(state_mapping), **options)
        self.read: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Array | None:
        self.read[id(variable)] = variable
        return super().get_current_value(variable)
