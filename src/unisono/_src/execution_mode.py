"""How the function that runs is run: as a trace, in which replicas cannot be run, or with nothing compiled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class RunsReplicasError(BaseException):  # not for `except Exception` around the line
    """The function that is being traced calls `strategy.run`, or takes a batch of a distributed dataset."""


class Runner:
    """What runs replicas: a strategy."""


class Mode(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.eager = 0


_mode = Mode()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    _mode.depth += 1
    try:
        yield
    finally:
        _mode.depth -= 1


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """For the block, nothing is compiled that replicas run."""
    _mode.eager += 1
    try:
        yield
    finally:
        _mode.eager -= 1


def is_eager() -> bool:
    return _mode.eager > 0


def check() -> None:
    """Called by what runs replicas, takes what they returned, or gives them batches."""
    if _mode.depth:
        raise RunsReplicasError
