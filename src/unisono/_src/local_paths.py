"""Paths of the local disk, for what is written there alone."""

from __future__ import annotations

import os
from pathlib import Path


def as_local_path(call: str, path: str | os.PathLike[str]) -> Path:
    """Take a path of the local disk, and refuse one with a protocol. Of that, pathlib would make a folder "s3:" here."""
    if "://" in os.fspath(path):
        raise ValueError(
            f"{call} received {os.fspath(path)!r}, and takes a path of the local disk. Only checkpoints take a protocol: un.Checkpoint, "
            f"un.latest_checkpoint and un.callbacks.BackupAndRestore. Write a local path, and copy what is there."
        )
    return Path(path)
