"""A garbage collector that leaves old objects alone during a trace."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def spare_old_objects() -> Iterator[None]:
    """Keep the garbage collector from objects that exist now.

    A trace makes some hundred thousand objects. Each collection of the oldest would walk all of Keras and JAX: a tenth of a first step.
    """
    if gc.get_freeze_count():  # by an outer block, or by the user, whose objects stay frozen
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def list_objects() -> list[object]:
    """List all objects of the garbage collector, those that are spared too."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    objects = gc.get_objects()
    if is_frozen:
        gc.freeze()
    return objects
