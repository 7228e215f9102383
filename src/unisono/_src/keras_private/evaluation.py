"""Layers that do in training what they do in evaluation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from unisono._src.keras_private.instances import wrapped_method
from unisono._src.keras_private.models import layers_of


@contextlib.contextmanager
def in_evaluation(*models: Any) -> Iterator[None]:
    """For the block, layers of these that draw in training, or normalize by the rows that they see, are called as in evaluation."""
    layers = {id(layer): layer for model in models for layer in layers_of(model)}
    with contextlib.ExitStack() as stack:
        for layer in layers.values():
            if layer._call_has_training_arg and (isinstance(layer, keras.layers.BatchNormalization) or draws(layer)):
                stack.enter_context(wrapped_method(layer, "call", without_training))
        yield


def draws(layer: Any) -> bool:
    """Return whether a layer has a seed generator of its own."""
    return bool(layer._seed_generators) and not isinstance(layer, keras.Model)


def without_training(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs | {"training": False})

    return called


COARSE = ("bfloat16", "float16")


def are_coarse(models: Iterable[Any]) -> bool:
    """Return whether layers of these compute in half precision, or in less."""
    policies = [layer.dtype_policy for model in models for layer in layers_of(model)]
    return any(policy.compute_dtype in COARSE or policy.quantization_mode is not None for policy in policies)
