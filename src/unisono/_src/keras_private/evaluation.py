"""Layers that do in training what they do in evaluation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

import keras

from unisono._src.keras_private.instances import Method, wrap_method
from unisono._src.keras_private.models import list_layers
from unisono._src.typing import KerasObject, PyTree


@contextlib.contextmanager
def call_as_in_evaluation(*models: keras.Layer) -> Iterator[None]:
    """Call, for the block, the layers that draw in training, or that normalize by the rows of the batch, as in evaluation."""
    layers = {id(layer): layer for model in models for layer in list_layers(model)}
    with contextlib.ExitStack() as stack:
        for layer in layers.values():
            draws = bool(layer._seed_generators) and not isinstance(layer, keras.Model)
            if layer._call_has_training_arg and (draws or isinstance(layer, keras.layers.BatchNormalization)):
                stack.enter_context(wrap_method(layer, "call", call_without_training))
        yield


def call_without_training(call: Method) -> Method:
    @functools.wraps(call)
    def call_in_evaluation(*args: PyTree, **kwargs: KerasObject) -> PyTree:
        return call(*args, **kwargs | {"training": False})

    return call_in_evaluation


COARSE_DTYPES = ("bfloat16", "float16")


def have_coarse_layers(models: Iterable[keras.Layer]) -> bool:
    """Return whether a layer of these models computes in half precision, or in less."""
    policies = [layer.dtype_policy for model in models for layer in list_layers(model)]
    return any(policy.compute_dtype in COARSE_DTYPES or policy.quantization_mode is not None for policy in policies)
