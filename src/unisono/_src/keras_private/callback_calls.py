"""Callbacks, and the arguments of Keras' methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import keras
from keras.src import utils as keras_utils
from keras.src.callbacks.callback_list import CallbackList

from unisono._src.typing import Arguments, Keywords, UserObject

BATCH_HOOKS = {
    mode: tuple(f"on_{prefix}batch_{when}" for prefix in ("", f"{mode}_") for when in ("begin", "end"))
    for mode in ("train", "test")
}


KEEPER_MARKER = "keeps_what_others_decide"
"""The attribute of a callback that runs after all others, at any place in the list."""

BOUND_METHOD = "steps_until_due"
"""The method by which a callback is recognized that limits the steps per call: see `StepBound`."""


CHANGING_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch"),
}
"""Attributes that change in callbacks of Keras that decide; checked with keras 3.15.0 and 3.15.1 by a test that reads their sources."""

STATELESS_CALLBACKS = (
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.TerminateOnNaN,
    keras.callbacks.CSVLogger,
)
"""Callbacks of Keras that decide nothing by earlier steps."""

WRITING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks of Keras that write or send something and do not change the training: only one of several processes runs them."""

WRITER_MARKER = "writes_for_all"
"""The attribute of our own callbacks that only one of several processes runs."""

CALLBACK_ATTRIBUTES = set(vars(keras.callbacks.Callback()))


class StepBound(Protocol):
    """A callback that acts at some steps, and limits the steps per call so that a call ends there."""

    def steps_until_due(self, step: int) -> int:
        """Return the number of steps from `step` on that one call may take."""
        ...

    def fit_is_over(self) -> None:
        """Clean up. It is called however fit ended."""
        ...


def read_argument(method: str, name: str, args: Arguments, kwargs: Keywords) -> UserObject:
    """Return an argument of a call of one of Keras' methods; None if the call does not fit the method, which Keras will report."""
    try:
        bound = inspect.signature(getattr(keras.Model, method)).bind_partial(None, *args, **kwargs)
    except TypeError:
        return None
    return bound.arguments.get(name)


def has_batch_callbacks(callbacks: UserObject, hooks: tuple[str, ...]) -> bool:
    """Return whether a callback does something at these hooks of single batches.

    Keras' progress bar does not count. Callbacks that save or log by epochs have such hooks too, and do nothing there.
    """
    for callback in list_callbacks(callbacks):
        is_idle = (
            hasattr(callback, BOUND_METHOD)
            or isinstance(callback, keras.callbacks.ProgbarLogger)
            or (
                isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore)
                and saves_by_epoch(callback)
            )
        )
        if not is_idle and not all(keras_utils.is_default(getattr(callback, hook)) for hook in hooks):
            return True
    return False


def saves_by_epoch(callback: keras.callbacks.Callback) -> bool:
    return getattr(callback, "save_freq", getattr(callback, "_save_freq", None)) == "epoch"


def list_callbacks(callbacks: UserObject) -> list[keras.callbacks.Callback]:
    """Return the callbacks in the argument `callbacks` of fit."""
    if isinstance(callbacks, CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks else []


def list_step_bounds(callbacks: UserObject) -> list[Callable[[int], int]]:
    """Return the methods of callbacks that limit the steps per call."""
    return [getattr(callback, BOUND_METHOD) for callback in list_callbacks(callbacks) if hasattr(callback, BOUND_METHOD)]


def has_keeper(callbacks: Iterable[keras.callbacks.Callback]) -> bool:
    """Return whether one of the callbacks keeps the decisions of the others."""
    return any(hasattr(callback, KEEPER_MARKER) for callback in callbacks)


def tell_fit_is_over(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Tell the callbacks that limit the steps per call that fit is over."""
    for callback in callbacks:
        if hasattr(callback, BOUND_METHOD):
            cast(StepBound, callback).fit_is_over()


def put_keepers_last(model: keras.Model, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Return the arguments of fit in which callbacks that keep the decisions of others come last."""
    callbacks = read_argument("fit", "callbacks", args, kwargs)
    if not has_keeper(list_callbacks(callbacks)):
        return args, kwargs
    in_order = sorted(list_callbacks(callbacks), key=lambda callback: hasattr(callback, KEEPER_MARKER))
    if isinstance(callbacks, CallbackList):
        callbacks.callbacks[:] = in_order
        return args, kwargs
    bound = inspect.signature(keras.Model.fit).bind(model, *args, **kwargs)
    bound.arguments["callbacks"] = in_order
    return bound.args[1:], bound.kwargs


def remove_writing_callbacks(method: str, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Return the arguments of fit or evaluate for a process that neither writes files nor shows progress."""
    bound = inspect.signature(getattr(keras.Model, method)).bind(None, *args, **kwargs)
    bound.arguments["verbose"] = 0
    bound.arguments["callbacks"] = select_silent_callbacks(bound.arguments.get("callbacks"))
    return bound.args[1:], bound.kwargs


def select_silent_callbacks(callbacks: UserObject) -> list[keras.callbacks.Callback]:
    """Return the callbacks that write and send nothing."""
    return [
        callback
        for callback in list_callbacks(callbacks)
        if not isinstance(callback, WRITING) and not hasattr(callback, WRITER_MARKER)
    ]


def set_first_epoch(model: keras.Model, epoch: int) -> None:
    """Set the first epoch of the call of fit that is about to begin."""
    model._initial_epoch = epoch


def forget_first_epoch(model: keras.Model) -> None:
    """Reset the first epoch: Keras would keep it for every later call of fit."""
    if model._initial_epoch:
        model._initial_epoch = None
