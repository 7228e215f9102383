"""What an export needs of Keras: the inputs that a model knows, and programs without kernels of this machine."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.models.functional import Functional

from unisono._src.keras_private.trainer_state import holds_value, variables_of

rnn: Any = importlib.import_module("keras.src.backend.jax.rnn")  # a function of its package has the same name


def input_tensors(model: Any) -> Any:
    """The nested symbolic tensors that a functional or sequential model is made over; None where it knows none."""
    if isinstance(model, Functional):
        return model.input
    if isinstance(model, keras.Sequential) and model._functional is not None:
        return model.inputs[0]
    return None


def lost_variables(model: Any) -> list[Any]:
    """Those whose values are neither in them nor in the model: a loop of Keras over another model holds them."""
    held = model._jax_state if getattr(model, "_jax_state", None) and not model._jax_state_synced else {}
    found = variables_of(model)
    groups = [name for name in ("trainable_variables", "non_trainable_variables") if not held.get(name)]
    return [variable for name in groups for variable in found[name] if not holds_value(variable)]


def settle(model: Any) -> None:
    """In a callback of fit: the variables hold what the loop has trained so far, as Keras does it before it saves."""
    model.jax_state_sync()


@contextlib.contextmanager
def for_every_platform() -> Iterator[None]:
    """For the block, layers choose no kernels that the machine has and another may not have."""
    flash, gpu = keras.config.is_flash_attention_enabled(), rnn._is_gpu_available
    keras.config.disable_flash_attention()
    rnn._is_gpu_available = lambda: False  # by which LSTM and GRU choose cuDNN
    try:
        yield
    finally:
        rnn._is_gpu_available = gpu
        if flash is not False:
            keras.config.enable_flash_attention()
