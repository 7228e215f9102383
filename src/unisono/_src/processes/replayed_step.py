"""The step that this process replays, if any. It starts from a checkpoint before this step, and writes no checkpoint."""

from __future__ import annotations

import os

from unisono._src.processes import names


def get_replayed_step() -> int | None:
    """Read the replayed step, counted from 0. None if this process replays none."""
    text = os.environ.get(names.REPLAY_STEP, "")
    return int(text) if text else None
