"""Whether a whole function is being traced, in which replicas cannot be run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class RunsReplicasError(Exception):
    """The function that is being traced calls `strategy.run`."""


class Tracing(threading.local):
    def __init__(self) -> None:
        self.depth = 0


_tracing = Tracing()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    _tracing.depth += 1
    try:
        yield
    finally:
        _tracing.depth -= 1


def check() -> None:
    """Called by what runs replicas, or takes what they returned."""
    if _tracing.depth:
        raise RunsReplicasError
