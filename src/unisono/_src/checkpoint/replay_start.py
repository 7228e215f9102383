"""The checkpoints that a replay may start from: those that were written before the step that is replayed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from unisono._src.checkpoint.reading import count_steps
from unisono._src.processes.replayed_step import get_replayed_step


def select_starts(paths: Iterable[Path]) -> list[Path]:
    """Return the checkpoints that this process may start from, in order: all of them, unless it replays a step.

    Files of Keras do not say how many steps came before them, so that no replay starts from them.
    """
    step = get_replayed_step()
    return [path for path in paths if step is None or count_steps(path) <= step]
