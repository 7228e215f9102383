"""The folders of a directory that are checkpoints, told by their names and by the files that Orbax leaves in them."""

from __future__ import annotations

import re
from pathlib import Path

ARRAYS = "arrays"
METADATA = "_CHECKPOINT_METADATA"


def find_checkpoints(directory: Path, name: str | None = None) -> list[tuple[str, int, Path]]:
    """Return the name, the number and the path of each checkpoint that was written whole; parts of it may be gone by now.

    All folders of a name count if one of them looks like a checkpoint, and all folders of the name that is given.
    """
    matches = [(re.fullmatch(r"(.+)_(\d+)", entry.name), entry) for entry in directory.iterdir()] if directory.is_dir() else []
    named = [(match[1], int(match[2]), entry) for match, entry in matches if match and entry.is_dir()]
    ours = {series for series, _, entry in named if any((entry / part).exists() for part in (METADATA, ARRAYS))} | {name}
    return [folder for folder in named if folder[0] in ours]
