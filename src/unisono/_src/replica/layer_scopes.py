"""Layers in scopes of their own: those whose statistics are a replica's, and those that see the whole batch also in replica code."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

import jax
import keras

from unisono._src.keras_private.instances import Method, wrap_method
from unisono._src.keras_private.models import has_own_statistics
from unisono._src.marks import BATCH_SCOPE, LAYER_SCOPE
from unisono._src.typing import KerasObject, PyTree


@contextlib.contextmanager
def mark_layers(layers: Iterable[keras.Layer]) -> Generator[None]:
    """Trace layers that normalize rows in scopes, for the block: by their replica's rows, or by those of the batch if they are synchronized."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if has_own_statistics(layer):
                stack.enter_context(wrap_in_scope(layer, LAYER_SCOPE))
            elif isinstance(layer, keras.layers.BatchNormalization):
                stack.enter_context(wrap_in_scope(layer, BATCH_SCOPE))
                layer.synchronized = False  # which Keras' operations on JAX refuse
                stack.callback(setattr, layer, "synchronized", True)
        yield


def wrap_in_scope(layer: keras.Layer, scope: str) -> contextlib.AbstractContextManager[None]:
    """Trace the calls of a layer in a scope, for the block."""

    def wrap(call: Method) -> Method:
        def call_in_scope(*args: PyTree, **kwargs: PyTree) -> KerasObject:
            with jax.named_scope(scope):
                return call(*args, **kwargs)

        return call_in_scope

    return wrap_method(layer, "call", wrap)
