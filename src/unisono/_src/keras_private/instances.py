"""What is set on one object, unseen by Keras' tracking of layers and variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def set_on(model: Any, name: str, value: Any) -> None:
    """An attribute of this one model, unseen by Keras' tracking of layers and variables."""
    object.__setattr__(model, name, value)


@contextlib.contextmanager
def wrapped_method(instance: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """For the block, `instance.name` is wrapped, on this one object."""
    before = instance.__dict__.get(name)
    object.__setattr__(instance, name, wrap(getattr(instance, name)))
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(instance, name)
        else:
            object.__setattr__(instance, name, before)


def wrapped_function(metric: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """For the block, the function that a MeanMetricWrapper takes the mean of is wrapped."""
    return wrapped_method(metric, "_fn", wrap)
