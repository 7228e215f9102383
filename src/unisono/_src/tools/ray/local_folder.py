"""Folders of a run on the local disk of a worker."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any


def find_local_folder(storage: Any, what: str) -> Path:
    """Find the folder of a run for one purpose. A run has the same one when it is started again, by its place in Ray's storage."""
    run = hashlib.sha256(storage.experiment_fs_path.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"unisono-{run}-{what}")
