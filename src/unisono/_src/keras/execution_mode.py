"""The mode of this thread. Inside of a trace replicas cannot run; in eager mode nothing is compiled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class RunsReplicasError(BaseException):  # not for `except Exception` around the line
    """The function that is being traced runs replicas. It calls `strategy.run`, or takes a batch of a distributed dataset."""


class Mode(threading.local):
    """The mode of a thread."""

    def __init__(self) -> None:
        self.trace_depth = 0
        self.eager_depth = 0


_mode = Mode()


@contextlib.contextmanager
def mark_tracing() -> Iterator[None]:
    """Refuse to run replicas in the block. A function is being traced."""
    _mode.trace_depth += 1
    try:
        yield
    finally:
        _mode.trace_depth -= 1


@contextlib.contextmanager
def disable_compilation() -> Iterator[None]:
    """Compile nothing that replicas run in the block."""
    _mode.eager_depth += 1
    try:
        yield
    finally:
        _mode.eager_depth -= 1


def is_eager() -> bool:
    return _mode.eager_depth > 0


def check_not_tracing() -> None:
    """Refuse to run replicas inside of a trace. Their results cannot be read there either, nor batches given to them."""
    if _mode.trace_depth:
        raise RunsReplicasError
