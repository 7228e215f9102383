"""Which folders of a directory are checkpoints: by their names, and by what Orbax leaves in them."""

from __future__ import annotations

import re
from pathlib import Path

ARRAYS = "arrays"
METADATA = "_CHECKPOINT_METADATA"


def found_in(directory: Path, name: str | None = None) -> list[tuple[str, int, Path]]:
    """(name, number, path) of what was a whole checkpoint once, though some of it may be gone by now.

    All folders of a name count where one of them looks like a checkpoint, and those of the name that is given.
    """
    matches = [(re.fullmatch(r"(.+)_(\d+)", entry.name), entry) for entry in directory.iterdir()] if directory.is_dir() else []
    named = [(match[1], int(match[2]), entry) for match, entry in matches if match and entry.is_dir()]
    ours = {of for of, _, entry in named if any((entry / part).exists() for part in (METADATA, ARRAYS))} | {name}
    return [found for found in named if found[0] in ours]
