"""Whether a whole function is being traced, in which replicas cannot be run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class RunsReplicasError(BaseException):  # not for `except Exception` around the line
    """The function that is being traced calls `strategy.run`, or takes a batch of a distributed dataset."""


class Runner:
    """What runs replicas: a strategy."""


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
    """Called by what runs replicas, takes what they returned, or gives them batches."""
    if _tracing.depth:
        raise RunsReplicasError
