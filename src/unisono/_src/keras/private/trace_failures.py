"""The layer in which a trace failed, and the first error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import keras

MADE_ANEW_IN_VAIN = "has no attribute '_error_repr'"
"""The text of a meaningless error. To add the arguments of a layer's call, Keras 3.15.1 makes an error again from a text, and JAX's errors
of traced values are made from an array."""

IN_BUILDING = "Unable to automatically build the model."
"""The beginning of Keras' error for a model that it could not build on the first batch."""


class LayerFailure(NamedTuple):
    """A layer whose call failed, and the first error that it raised."""

    layer: keras.Layer
    cause: BaseException


def find_failed_layer(error: BaseException) -> LayerFailure | None:
    """Find the innermost layer whose call raised the error. None if the error comes from elsewhere."""
    cause = find_first_error(error)
    layers = [layer for layer in walk_layers(cause) if not isinstance(layer, keras.Model)]
    return LayerFailure(layers[-1], cause) if layers else None


def find_first_error(error: BaseException) -> BaseException:
    """Find the first error, before Keras added a layer's arguments to it."""
    while error.__context__ is not None and is_made_by_keras(error):
        error = error.__context__
    return error


def is_made_by_keras(error: BaseException) -> bool:
    """Whether Keras has made the error from another one."""
    text = str(error)
    is_meaningless = isinstance(error, AttributeError) and MADE_ANEW_IN_VAIN in text
    return hasattr(error, "_keras_call_info_injected") or is_meaningless or text.startswith(IN_BUILDING)


def walk_layers(error: BaseException) -> Iterator[keras.Layer]:
    """Yield the layers that the error passed through, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if not isinstance(owner, keras.Layer):  # Keras calls a layer by this function, whose frame outlives Keras' filter
            owner = getattr(trace.tb_frame.f_locals.get("fn"), "__self__", None)
        if isinstance(owner, keras.Layer):
            yield owner
        trace = trace.tb_next
