"""Attributes of one object, set without Keras' tracking."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from unisono._src.typing import KerasObject

Method: TypeAlias = Callable[..., KerasObject]
"""A method of Keras, or a function in its place."""

UNSET = object()
"""A mark for an attribute that the object lacks, and its class or a base has."""


def set_untracked(model: object, name: str, value: object) -> None:
    """Set an attribute without Keras' tracking of layers and variables."""
    object.__setattr__(model, name, value)


@contextlib.contextmanager
def wrap_method(instance: object, name: str, wrap: Callable[[Method], Method]) -> Iterator[None]:
    """Wrap `instance.name` for the block, on this one object."""
    before = vars(instance).get(name, UNSET)
    set_untracked(instance, name, wrap(getattr(instance, name)))
    try:
        yield
    finally:
        if before is UNSET:
            object.__delattr__(instance, name)
        else:
            set_untracked(instance, name, before)
