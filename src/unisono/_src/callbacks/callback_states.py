"""The state of callbacks that make decisions, so that a resumed run decides the same.

A callback of the user takes part by two methods: `get_state()` returns JSON and arrays, `set_state(state)` takes them back.
Keras' callbacks do not have these methods; their states are read and set here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import keras
import numpy as np

from unisono._src.checkpoint.checkpoint import is_stateful
from unisono._src.keras_private.callbacks import CHANGING_ATTRIBUTES
from unisono._src.typing import PyTree

Access: TypeAlias = tuple[Callable[[], PyTree], Callable[[PyTree], None]]
"""The functions that get and set the state of a callback."""

STATELESS_CALLBACKS = (
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.TerminateOnNaN,
    keras.callbacks.CSVLogger,
)
"""Callbacks of Keras that decide nothing by earlier steps."""


def collect_states(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, PyTree]:
    """Return the states of callbacks, by class, by what is monitored, and by a number where several callbacks share both."""
    return {name: get() for name, (get, _) in find_access(callbacks).items()}


def set_states(callbacks: Iterable[keras.callbacks.Callback], states: dict[str, PyTree]) -> None:
    """Set the states of callbacks. A callback without a state among these begins anew."""
    for name, (_, set_state) in find_access(callbacks).items():
        if name in states:
            set_state(states[name])


def find_lost_states(callbacks: Iterable[keras.callbacks.Callback], states: dict[str, PyTree]) -> list[str]:
    """Return the names of the states that no callback takes."""
    taken = find_access(callbacks)
    return [name for name, state in states.items() if name not in taken and state is not None]


def find_fresh_callbacks(callbacks: Iterable[keras.callbacks.Callback], states: dict[str, PyTree]) -> list[str]:
    """Return the names of the callbacks that have a state, but none in `states`."""
    return [name for name, (get, _) in find_access(callbacks).items() if name not in states and get() is not None]


def find_unsaved_callbacks(callbacks: Iterable[keras.callbacks.Callback]) -> list[str]:
    """Return the classes of the callbacks that may have a state which is not saved."""
    return [
        type(callback).__name__
        for callback in callbacks
        if find_attributes(callback) is None
        and not is_stateful(callback)
        and not isinstance(callback, STATELESS_CALLBACKS)
        and vars(callback).keys() - vars(keras.callbacks.Callback())
    ]


def find_access(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, Access]:
    """Return the access to the state of each callback that has one, by the callback's name."""
    accesses: dict[str, Access] = {}
    counts: dict[str, int] = {}
    for callback in callbacks:
        names = find_attributes(callback)
        kind = type(callback).__name__
        if is_stateful(callback):
            access = callback.get_state, callback.set_state
        elif names is not None:
            access = make_getter(callback, names), make_setter(callback, names)
        else:
            continue
        monitor = vars(callback).get("monitor")
        if isinstance(monitor, str):
            kind = f"{kind}(monitor={monitor!r})"
        counts[kind] = counts.get(kind, 0) + 1
        accesses[kind if counts[kind] == 1 else f"{kind} number {counts[kind]}"] = access
    return accesses


def find_attributes(callback: keras.callbacks.Callback) -> tuple[str, ...] | None:
    """Return the attributes in which a callback of Keras keeps its state; None where no state is known."""
    return next((names for kind, names in CHANGING_ATTRIBUTES.items() if isinstance(callback, kind)), None)


def make_getter(callback: keras.callbacks.Callback, names: tuple[str, ...]) -> Callable[[], dict[str, PyTree]]:
    return lambda: {name: convert_numbers(getattr(callback, name)) for name in names if hasattr(callback, name)}


def make_setter(callback: keras.callbacks.Callback, names: tuple[str, ...]) -> Callable[[dict[str, PyTree]], None]:
    def set_state(state: dict[str, PyTree]) -> None:
        for name in state.keys() & set(names):  # a file sets no other attributes
            setattr(callback, name, state[name])

    return set_state


def convert_numbers(value: PyTree) -> PyTree:
    """Return numbers of JAX or NumPy as Python's, which have all their digits; and lists as lists of NumPy arrays."""
    if isinstance(value, list):
        return [np.asarray(item) for item in value]
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 0) else value
