"""What an export needs of Keras. The inputs that a model knows, and programs without kernels of this machine."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.models.functional import Functional

from unisono._src.keras.private.trainer_state import get_held_state, group_variables, has_value
from unisono._src.typing import PyTree

rnn: Any = importlib.import_module("keras.src.backend.jax.rnn")  # a function of its package has the same name


def find_input_tensors(model: keras.Model) -> PyTree | None:
    """Find the nested symbolic inputs of a functional or sequential model. None if the model knows none."""
    if isinstance(model, Functional):
        return model.input
    if isinstance(model, keras.Sequential) and model._functional is not None:
        return model.inputs[0]
    return None


def list_lost_variables(model: keras.Model) -> list[keras.Variable]:
    """List the variables whose values are in neither variables nor model. A loop of Keras over another model holds them."""
    held = get_held_state(model)
    variables = group_variables(model)
    groups = [name for name in ("trainable_variables", "non_trainable_variables") if not held.get(name)]
    return [variable for name in groups for variable in variables[name] if not has_value(variable)]


@contextlib.contextmanager
def avoid_platform_kernels() -> Iterator[None]:
    """Keep layers from platform kernels in the block. Another machine may not have these kernels."""
    flash = keras.config.is_flash_attention_enabled()
    is_gpu_available = rnn._is_gpu_available
    keras.config.disable_flash_attention()
    rnn._is_gpu_available = lambda: False  # LSTM and GRU choose cuDNN by it
    try:
        yield
    finally:
        rnn._is_gpu_available = is_gpu_available
        if flash is not False:
            keras.config.enable_flash_attention()
