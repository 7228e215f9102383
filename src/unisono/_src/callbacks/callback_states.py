"""What callbacks that decide keep between epochs, so that a resumed run decides the same.

A callback of a user's own takes part by two methods: `get_state()` returns what JSON knows, and arrays; `set_state(state)` takes
it back. Keras' callbacks have none, so that theirs are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from unisono._src import keras_private
from unisono._src.checkpoint.checkpoint import is_stateful


def states_of(callbacks: Iterable[Any]) -> dict[str, Any]:
    """By the callbacks' classes, what they monitor, and their numbers among those of which both are the same."""
    return {name: found() for name, (found, _) in known(callbacks).items()}


def set_states(callbacks: Iterable[Any], states: dict[str, Any]) -> None:
    """Callbacks that were not there before begin anew."""
    for name, (_, put) in known(callbacks).items():
        if name in states:
            put(states[name])


def lost(callbacks: Iterable[Any], states: dict[str, Any]) -> list[str]:
    """The states that no callback takes."""
    taken = known(callbacks)
    return [name for name, state in states.items() if name not in taken and state is not None]


def fresh(callbacks: Iterable[Any], states: dict[str, Any]) -> list[str]:
    """The callbacks that have a state, and none in `states`."""
    return [name for name, (found, _) in known(callbacks).items() if name not in states and found() is not None]


def unknown(callbacks: Iterable[Any]) -> list[str]:
    """The classes of callbacks that may keep something which is not saved."""
    return [
        type(callback).__name__
        for callback in callbacks
        if attributes_of(callback) is None
        and not is_stateful(callback)
        and not isinstance(callback, keras_private.WITHOUT_STATE)
        and set(vars(callback)) - keras_private.OF_EVERY_CALLBACK
    ]


def known(callbacks: Iterable[Any]) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
    counts: dict[str, int] = {}
    for callback in callbacks:
        names, kind = attributes_of(callback), type(callback).__name__
        if is_stateful(callback):
            access = callback.get_state, callback.set_state
        elif names is not None:
            access = getter(callback, names), setter(callback, names)
        else:
            continue
        if isinstance(vars(callback).get("monitor"), str):
            kind = f"{kind}(monitor={callback.monitor!r})"
        counts[kind] = counts.get(kind, 0) + 1
        found[kind if counts[kind] == 1 else f"{kind} number {counts[kind]}"] = access
    return found


def attributes_of(callback: Any) -> tuple[str, ...] | None:
    return next((names for of, names in keras_private.CHANGING.items() if isinstance(callback, of)), None)


def getter(callback: Any, names: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    return lambda: {name: plain(getattr(callback, name)) for name in names if hasattr(callback, name)}


def setter(callback: Any, names: tuple[str, ...]) -> Callable[[dict[str, Any]], None]:
    def put(state: dict[str, Any]) -> None:
        for name in state.keys() & set(names):  # a file sets nothing else
            setattr(callback, name, state[name])

    return put


def plain(value: Any) -> Any:
    """Numbers of JAX or NumPy as Python's, which have all their digits."""
    if isinstance(value, list):
        return [np.asarray(item) for item in value]
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 0) else value
