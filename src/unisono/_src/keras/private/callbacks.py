"""Keras' callbacks: their lists, their hooks and their changing attributes."""

from __future__ import annotations

import keras
from keras.src import utils as keras_utils
from keras.src.callbacks.callback_list import CallbackList as CallbackList

from unisono._src.typing import UserObject

CHANGING_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch"),
}
"""Attributes that change in Keras' deciding callbacks. A test reads the sources of these classes."""


def list_callbacks(callbacks: UserObject) -> list[keras.callbacks.Callback]:
    """List the callbacks in the argument `callbacks` of fit."""
    if isinstance(callbacks, CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks else []


def acts_at_batches(callback: keras.callbacks.Callback, mode: str) -> bool:
    """Whether a callback acts at single batches, in mode "train" or "test".

    Keras' progress bar does not count. Callbacks that save by epochs have such hooks too, and do nothing there.
    """
    saves = isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore)
    if isinstance(callback, keras.callbacks.ProgbarLogger) or (saves and callback.save_freq == "epoch"):
        return False
    hooks = [f"on_{prefix}batch_{when}" for prefix in ("", f"{mode}_") for when in ("begin", "end")]
    return not all(keras_utils.is_default(getattr(callback, hook)) for hook in hooks)


def set_first_epoch(model: keras.Model, epoch: int) -> None:
    """Set the first epoch of the next call of fit."""
    model._initial_epoch = epoch


def forget_first_epoch(model: keras.Model) -> None:
    """Reset the first epoch. Keras would keep it for every later call of fit."""
    if model._initial_epoch:
        model._initial_epoch = None
