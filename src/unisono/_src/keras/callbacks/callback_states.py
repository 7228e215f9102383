"""The state of callbacks that make decisions.

It is saved so that a resumed run decides the same. A callback of the user takes part by two methods: `get_state()` returns JSON
and arrays, `set_state(state)` takes them back. Keras' callbacks do not have these methods; their states are read and set here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import jax
import keras
import numpy as np

from unisono._src.keras.checkpoint.checkpoint import Stateful, is_stateful
from unisono._src.keras.private.callbacks import CHANGING_ATTRIBUTES
from unisono._src.typing import PyTree

STATELESS_CALLBACKS = (
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.TerminateOnNaN,
    keras.callbacks.CSVLogger,
)
"""Callbacks of Keras that decide nothing by earlier steps."""

CALLBACK_ATTRIBUTES = set(vars(keras.callbacks.Callback()))


class AttributeState:
    """The state of a callback of Keras: attributes of these names."""

    def __init__(self, callback: keras.callbacks.Callback, names: Iterable[str]) -> None:
        self._callback = callback
        self._names = names

    def get_state(self) -> dict[str, PyTree]:
        return {name: convert_numbers(getattr(self._callback, name)) for name in self._names if hasattr(self._callback, name)}

    def set_state(self, state: dict[str, PyTree]) -> None:
        for name in state.keys() & set(self._names):  # a file sets no other attributes
            setattr(self._callback, name, state[name])


def convert_numbers(value: PyTree) -> PyTree:
    """Convert JAX and NumPy numbers to Python's, which keep all digits. A list becomes a list of NumPy arrays."""
    if isinstance(value, list):
        return [np.asarray(item) for item in value]
    return value.item() if isinstance(value, np.generic | np.ndarray | jax.Array) and not value.ndim else value


def find_state(callback: keras.callbacks.Callback) -> Stateful | None:
    """Find an object that reads and sets a callback's state. It is None if no state is known."""
    if is_stateful(callback):
        return callback
    names = next((names for kind, names in CHANGING_ATTRIBUTES.items() if isinstance(callback, kind)), None)
    return None if names is None else AttributeState(callback, names)


def find_states(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, Stateful]:
    """Find the states of callbacks, by name.

    The name is the class, what is monitored, and a number if several callbacks share both.
    """
    states: dict[str, Stateful] = {}
    counts: Counter[str] = Counter()
    for callback in callbacks:
        state = find_state(callback)
        if state is not None:
            monitor = vars(callback).get("monitor")
            kind = type(callback).__name__ + (f"(monitor={monitor!r})" if isinstance(monitor, str) else "")
            counts[kind] += 1
            states[kind if counts[kind] == 1 else f"{kind} number {counts[kind]}"] = state
    return states


def collect_states(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, PyTree]:
    """Collect the states of callbacks by name."""
    return {name: state.get_state() for name, state in find_states(callbacks).items()}


def set_states(callbacks: Iterable[keras.callbacks.Callback], saved: dict[str, PyTree]) -> None:
    """Set the states of callbacks. A callback without a state among these begins anew."""
    for name, state in find_states(callbacks).items():
        if name in saved:
            state.set_state(saved[name])


def list_other_callbacks(callbacks: Iterable[keras.callbacks.Callback], saved: dict[str, PyTree]) -> list[str]:
    """List how the callbacks differ from those of a checkpoint. `saved` are the states in the checkpoint."""
    states = collect_states(callbacks)
    gone = [name for name, state in saved.items() if name not in states and state is not None]
    new = [name for name, state in states.items() if name not in saved and state is not None]
    return [f"it holds the state of {name}, which is not among the callbacks now" for name in gone] + [
        f"{name} is among the callbacks now, and begins anew" for name in new
    ]


def find_unsaved_callbacks(callbacks: Iterable[keras.callbacks.Callback]) -> list[str]:
    """Find the classes of callbacks whose state may not be saved."""
    unknown = [one for one in callbacks if find_state(one) is None and not isinstance(one, STATELESS_CALLBACKS)]
    return [type(callback).__name__ for callback in unknown if set(vars(callback)) - CALLBACK_ATTRIBUTES]
