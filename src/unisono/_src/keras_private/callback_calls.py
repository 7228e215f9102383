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


KEEPER = "keeps_what_others_decide"
"""What a callback is that comes after all others, whatever its place in the list."""

BOUND = "steps_until_due"
"""The method of a callback that takes steps in groups, and says how many may come at once: `steps_until_due(step)`. It also has
`fit_is_over()`, which is called however fit ended."""


CHANGING: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch"),
}
"""What changes in Keras' callbacks that decide; checked with keras 3.15.0 and 3.15.1 by a test that reads their sources."""

WITHOUT_STATE = (
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.TerminateOnNaN,
    keras.callbacks.CSVLogger,
)
"""Callbacks of Keras that decide nothing by what they have seen."""

WRITING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks of Keras that write or send something, and change no training: of several processes one has them."""

WRITER = "writes_for_all"
"""What such a callback of ours has."""

OF_EVERY_CALLBACK = set(vars(keras.callbacks.Callback()))


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
    for callback in listed(callbacks):
        idle = (
            hasattr(callback, BOUND)
            or isinstance(callback, keras.callbacks.ProgbarLogger)
            or (isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore) and by_epoch(callback))
        )
        if not idle and not all(keras_utils.is_default(getattr(callback, hook)) for hook in hooks):
            return True
    return False


def by_epoch(callback: Any) -> bool:
    return getattr(callback, "save_freq", getattr(callback, "_save_freq", None)) == "epoch"


def listed(callbacks: Any) -> list[Any]:
    """Of what fit was given as callbacks."""
    if isinstance(callbacks, CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks else []


def bounds_of(callbacks: Any) -> list[Any]:
    return [getattr(callback, BOUND) for callback in listed(callbacks) if hasattr(callback, BOUND)]


def has_keeper(callbacks: list[Any]) -> bool:
    return any(hasattr(callback, KEEPER) for callback in callbacks)


def fit_is_over(callbacks: list[Any]) -> None:
    for callback in callbacks:
        if hasattr(callback, BOUND):
            callback.fit_is_over()


def with_last(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of fit with those callbacks last that keep what the others decide."""
    given = argument("fit", "callbacks", args, kwargs)
    if not has_keeper(listed(given)):
        return args, kwargs
    in_order = sorted(listed(given), key=lambda callback: hasattr(callback, KEEPER))
    if isinstance(given, CallbackList):
        given.callbacks[:] = in_order
        return args, kwargs
    bound = inspect.signature(keras.Model.fit).bind(model, *args, **kwargs)
    bound.arguments["callbacks"] = in_order
    return bound.args[1:], bound.kwargs


def without_writing(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of fit or evaluate, for a process that neither writes files nor shows progress."""
    bound = inspect.signature(getattr(keras.Model, method)).bind(None, *args, **kwargs)
    bound.arguments["verbose"] = 0
    bound.arguments["callbacks"] = that_do_not_write(bound.arguments.get("callbacks"))
    return bound.args[1:], bound.kwargs


def that_do_not_write(callbacks: Any) -> list[Any]:
    return [of for of in listed(callbacks) if not isinstance(of, WRITING) and not hasattr(of, WRITER)]


def begin_with_epoch(model: Any, epoch: int) -> None:
    """Of the call of fit that is about to begin."""
    model._initial_epoch = epoch


def forget_first_epoch(model: Any) -> None:
    """Keras keeps it for every later call of fit."""
    if model._initial_epoch:
        model._initial_epoch = None
