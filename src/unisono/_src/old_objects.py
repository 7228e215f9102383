"""A garbage collector that leaves old objects alone during a trace."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

NEVER = 2**31 - 1

_lock = threading.Lock()
_blocks = 0
"""How many blocks are open, in all threads."""
_thresholds = (0, 0, 0)
"""The user's, while a block is open."""


@contextlib.contextmanager
def spare_old_objects() -> Iterator[None]:
    """Keep the garbage collector from walking old objects.

    A trace makes some hundred thousand objects. Each collection of the oldest would walk all of Keras and JAX: a tenth of a first step.
    """
    global _blocks, _thresholds
    with _lock:
        if not _blocks:
            _thresholds = gc.get_threshold()
            gc.set_threshold(*_thresholds[:2], NEVER)
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                gc.set_threshold(*_thresholds)
