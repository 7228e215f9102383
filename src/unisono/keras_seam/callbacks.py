"""Callbacks, and the arguments of Keras' methods."""

from __future__ import annotations

import inspect
from typing import Any

import keras
from keras.src import utils as keras_utils
from keras.src.callbacks.callback_list import CallbackList

HOOKS = {
    mode: tuple(f"on_{of}batch_{when}" for of in ("", f"{mode}_") for when in ("begin", "end")) for mode in ("train", "test")
}


def argument(method: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument of a call of one of Keras' methods; None where the call does not fit, which Keras will say."""
    try:
        bound = inspect.signature(getattr(keras.Model, method)).bind_partial(None, *args, **kwargs)
    except TypeError:
        return None
    return bound.arguments.get(name)


def wants_batches(callbacks: Any, hooks: tuple[str, ...]) -> bool:
    """Whether a callback does something at these hooks of single batches. Keras' bar shows what it is given, and callbacks
    that save or log by epochs have such hooks and do nothing there."""
    listed = callbacks.callbacks if isinstance(callbacks, CallbackList) else keras.tree.flatten(callbacks) if callbacks else []
    for callback in listed:
        idle = isinstance(callback, keras.callbacks.ProgbarLogger) or (
            isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore) and by_epoch(callback)
        )
        if not idle and not all(keras_utils.is_default(getattr(callback, hook)) for hook in hooks):
            return True
    return False


def by_epoch(callback: Any) -> bool:
    return getattr(callback, "save_freq", getattr(callback, "_save_freq", None)) == "epoch"
