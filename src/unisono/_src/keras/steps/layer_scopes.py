"""Named scopes that tell whose statistics a layer has.

They are a replica's, or the whole batch's. A layer says it by `synchronized`, which is Keras' word for batch normalization, and
may be set on any layer. Inner layers go before outer ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

import jax
import keras

from unisono._src.keras.private.instances import Method, wrap_method
from unisono._src.programs.marks import BATCH_SCOPE, LAYER_SCOPE
from unisono._src.typing import KerasObject, PyTree


@contextlib.contextmanager
def mark_layers(layers: Iterable[keras.Layer]) -> Generator[None]:
    """Trace layers that have `synchronized` in scopes, for the block."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            synchronized: bool | None = getattr(layer, "synchronized", None)
            if synchronized is None:
                continue
            stack.enter_context(wrap_in_scope(layer, BATCH_SCOPE if synchronized else LAYER_SCOPE))
            if synchronized and isinstance(layer, keras.layers.BatchNormalization):
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
