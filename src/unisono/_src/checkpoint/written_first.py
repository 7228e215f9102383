"""Files that are written before a checkpoint: a run that resumes from the checkpoint does not take the steps before it again."""

from __future__ import annotations

from collections.abc import Callable

_writers: list[Callable[[], None]] = []


def add_writer(write: Callable[[], None]) -> None:
    """Have `write` called before each checkpoint of this process is written, in the thread that writes it."""
    _writers.append(write)


def remove_writer(write: Callable[[], None]) -> None:
    if write in _writers:
        _writers.remove(write)


def write_first() -> None:
    """Write what must be on disk before the next checkpoint."""
    for write in list(_writers):
        write()
