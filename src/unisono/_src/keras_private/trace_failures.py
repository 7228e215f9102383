"""Which layer a trace failed in, and the error behind the one that Keras raises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

MADE_ANEW_IN_VAIN = "has no attribute '_error_repr'"
"""What an error says that is nobody's mistake: to add the arguments of a layer's call, Keras 3.15.1 makes an error again from a
text, and JAX's errors of traced values take an array in its place."""

IN_BUILDING = "Unable to automatically build the model."
"""How an error begins by which Keras tells that a model could not be built on its first batch."""


class Failure(NamedTuple):
    """A layer whose call raised something, and what it raised first."""

    layer: Any
    cause: BaseException


def failure_behind(error: BaseException) -> Failure | None:
    """Return the innermost layer in whose call the error was raised; None where it comes from elsewhere."""
    cause = first_raised(error)
    layers = [layer for layer in layers_in(cause) if not isinstance(layer, keras.Model)]
    return Failure(layers[-1], cause) if layers else None


def first_raised(error: BaseException) -> BaseException:
    """Return the error that Keras added a layer's arguments to, or the error itself."""
    while error.__context__ is not None and is_made_by_keras(error):
        error = error.__context__
    return error


def is_made_by_keras(error: BaseException) -> bool:
    text = str(error)
    is_in_vain = isinstance(error, AttributeError) and MADE_ANEW_IN_VAIN in text
    return hasattr(error, "_keras_call_info_injected") or is_in_vain or text.startswith(IN_BUILDING)


def layers_in(error: BaseException) -> Iterator[Any]:
    """The layers whose methods the error went through, from the outside."""
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if not isinstance(owner, keras.Layer):  # Keras calls a layer by this function, whose frame outlives Keras' filter
            owner = getattr(trace.tb_frame.f_locals.get("fn"), "__self__", None)
        if isinstance(owner, keras.Layer):
            yield owner
        trace = trace.tb_next
