"""The step that this process replays, if it replays one: it starts from a checkpoint before this step, and writes no checkpoint."""

from __future__ import annotations

import os

SWITCH = "UNISONO_REPLAY_STEP"
"""The environment variable that names the step, counted from 0."""


def get_replayed_step() -> int | None:
    """Return the step that is replayed; None where this process trains by itself."""
    text = os.environ.get(SWITCH, "")
    return int(text) if text else None
