"""The state that Keras' loops hold, and scopes of a state."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import keras
from keras.src import backend

from unisono._src.keras_private.instances import set_on

State = tuple[list[Any], ...]
STATE_NAMES = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
WITHOUT_OPTIMIZER = tuple(name for name in STATE_NAMES if name != "optimizer_variables")


def hold_state(model: Any, names: tuple[str, ...], state: State) -> None:
    """Makes `state` what the model goes back to when a callback looks or the loop ends, however it ends."""
    set_on(model, "_jax_state", dict(zip(names, state, strict=True)))
    set_on(model, "_jax_state_synced", False)


def take_state(model: Any, purge: bool, **groups: bool) -> State:
    """The model's state as lists of arrays, as Keras takes it; but at no moment is it nowhere.

    Keras empties the variables first: what interrupts it there leaves a model without weights. And an array that two variables hold, as
    weights do that were overwritten by their averages, is copied: the memory of the state is used again.
    """
    names = [name for name in STATE_NAMES if groups.get(name)]
    held = collections.Counter(id(v._value) for v in all_variables(model))
    state = tuple([v.value.copy() if held[id(v._value)] > 1 else v.value for v in variables_of(model)[name]] for name in names)
    if purge:
        model._jax_state = dict(zip(names, state, strict=True))
        model._jax_state_synced = False
        model._purge_model_variables(**groups)
    return state


def variables_of(model: Any) -> dict[str, list[Any]]:
    optimizer = getattr(model, "optimizer", None)
    return dict(
        zip(
            STATE_NAMES,
            (
                model.trainable_variables,
                model.non_trainable_variables,
                optimizer.variables if optimizer is not None else [],
                model.metrics_variables,
            ),
            strict=True,
        )
    )


def ids_of_variables(model: Any) -> list[int]:
    """Return the ids of the trainable variables and of the others. A count of each does not tell which are trained."""
    return [id(v) for group in (model.trainable_variables, model.non_trainable_variables) for v in group]


def current_values(model: Any, names: tuple[str, ...]) -> dict[str, list[Any]]:
    """The newest values of the model's variables, also in a callback, while a loop holds them outside the model."""
    held = model._jax_state if getattr(model, "_jax_state", None) and not model._jax_state_synced else {}
    variables = variables_of(model)
    return {name: list(held[name]) if held.get(name) else [v.value for v in variables[name]] for name in names}


def newest_values(model: Any) -> dict[int, Any]:
    """The same by the variables' ids."""
    variables = variables_of(model)
    found = current_values(model, STATE_NAMES)
    return {id(v): value for name in STATE_NAMES for v, value in zip(variables[name], found[name], strict=True)}


def holds_value(variable: Any) -> bool:
    """False while a loop of Keras holds the variable's value outside of it."""
    return variable._value is not None


def stateless_scope() -> Any:
    """The innermost StatelessScope around this line, if there is one."""
    return backend.get_stateless_scope() if backend.in_stateless_scope() else None


def all_variables(model: Any) -> list[Any]:
    """Its own, its optimizer's and its metrics'."""
    return [variable for group in variables_of(model).values() for variable in group]


def raw_value(variable: Any) -> Any:
    """The variable's array, in the variable's dtype."""
    return variable._value


def set_raw_value(variable: Any, value: Any) -> None:
    """Takes an array that was computed from the variable's own, of its shape and dtype."""
    variable._value = value


class RecordingScope(keras.StatelessScope):
    """A StatelessScope that remembers which variables were assigned, also those that it was not told of."""

    def __init__(self, state_mapping: list[tuple[Any, Any]], **options: Any) -> None:
        super().__init__(state_mapping=state_mapping, **options)
        self.assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


class ReadingScope(RecordingScope):
    """One that also remembers which variables were read."""

    def __init__(self, state_mapping: Sequence[tuple[Any, Any]] = (), **options: Any) -> None:
        super().__init__(state_mapping=list(state_mapping), **options)
        self.read: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        self.read[id(variable)] = variable
        return super().get_current_value(variable)
