"""The step that this process replays, if it replays one: it starts from a checkpoint before this step, and writes no checkpoint."""

from __future__ import annotations

import os

from unisono._src.processes import names


def get_replayed_step() -> int | None:
    """Return the step that is replayed, counted from 0; None where this process replays none."""
    text = os.environ.get(names.REPLAY_STEP, "")
    return int(text) if text else None
