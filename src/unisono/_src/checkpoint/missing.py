"""What to say of a path at which there is no checkpoint: what is there instead."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from unisono._src.checkpoint.disk_space import find_folder
from unisono._src.checkpoint.reading import METADATA, find_checkpoints

MOST_NAMES = 5
"""Names of a folder that an error lists."""


def refuse_missing(path: Path) -> None:
    """Refuse a path at which there is nothing, a folder of checkpoints, or a file. Damaged checkpoints are not refused here."""
    if not os.path.lexists(path):
        raise FileNotFoundError(f"The checkpoint {path} is not there. {describe_neighbours(path)}")
    if path.is_file():
        raise ValueError(
            f"{path} is a file, and un.Checkpoint writes folders. Write model.load_weights(path) for a .weights.h5 file of Keras, and "
            f"keras.saving.load_model(path) for a .keras file."
        )
    if not (path / METADATA).exists() and find_checkpoints(path):
        raise ValueError(
            f"{path} is a folder of checkpoints. Write restore(un.latest_checkpoint({str(path)!r})) for the newest in it."
        )


def describe_neighbours(path: Path) -> str:
    """Return what lies in the folder of a path that is not there, near names first, or in the nearest folder that is there."""
    folder = find_folder(path.parent)
    beside = "" if folder == path.parent else f"There is no folder {path.parent}. "
    checkpoints = [found.name for _, _, found in sorted(find_checkpoints(folder), reverse=True)]
    names = checkpoints or sorted(entry.name for entry in folder.iterdir())
    missing = path.relative_to(folder).parts[0]
    near = difflib.get_close_matches(missing, names, n=MOST_NAMES)
    listed = [*near, *(name for name in names if name not in near)][:MOST_NAMES]
    more = f" and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
    advice = f" Write restore(un.latest_checkpoint({str(folder)!r})) for the newest." if checkpoints else ""
    return f"{beside}In {folder} there {'are' if len(listed) > 1 else 'is'} {', '.join(listed) or 'nothing'}{more}.{advice}"
