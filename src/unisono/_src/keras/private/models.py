"""A model's layers, and the methods of its trainer."""

from __future__ import annotations

import functools

import keras

from unisono._src.hidden_frames import PUBLIC_CALL
from unisono._src.keras.private.instances import Method, set_untracked
from unisono._src.typing import KerasObject

PRIVATE_METHODS = {"build_by": "_symbolic_build", "take_state": "_get_jax_state"}
"""Our names for private methods of Keras' trainer."""


def get_class_method(model: keras.Model, name: str) -> Method:
    """Get a method of the model's class, under Keras' name or ours. A method that was set on the model itself is passed over."""
    return getattr(type(model), PRIVATE_METHODS.get(name, name)).__get__(model)


def replace_trainer_method(model: keras.Model, name: str, method: Method) -> None:
    """Set a method on one model, under Keras' name or ours. It keeps the signature and docstring of the class' method."""
    name_of_keras = PRIVATE_METHODS.get(name, name)
    stock = getattr(type(model), name_of_keras)

    @functools.wraps(stock)
    def call_ours(*args: KerasObject, **kwargs: KerasObject) -> KerasObject:
        with PUBLIC_CALL:
            return method(*args, **kwargs)

    set_untracked(model, name_of_keras, call_ours)


def release_state(model: keras.Model) -> None:
    """Write the state into the variables and drop other references. To be called at the end of a loop, however it ended."""
    model.jax_state_sync()
    set_untracked(model, "_jax_state", None)


def list_layers(model: keras.Layer) -> list[keras.Layer]:
    """List a model or a layer with all its inner layers."""
    return list(model._flatten_layers())


def supports_jit(model: keras.Model) -> bool:
    """Whether all layers declare that they can be compiled. If one does not, Keras compiles nothing."""
    return all(layer.supports_jit for layer in list_layers(model))


def find_eager_option(model: keras.Model) -> str | None:
    """Find the option of compile() that forbids compiled steps. None if steps are compiled.

    If a layer does not declare that it can be compiled, Keras' `jit_compile` is False by default; most such layers can be compiled on JAX.
    """
    if model.run_eagerly:
        return "run_eagerly=True"
    return "jit_compile=False" if not model.jit_compile and supports_jit(model) else None


def is_built(model: keras.Layer) -> bool:
    return all(layer.built for layer in list_layers(model))


def overrides_method(model: keras.Model, method: str) -> bool:
    """Whether the model's class overrides a method of Keras' trainer."""
    return getattr(type(model), method) is not getattr(keras.Model, method)
