"""Whether what a checkpoint holds fits what it is to be put into: every difference, named on both sides."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

MOST_LINES = 20


def check(where: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Of arrays, or what has a shape and a dtype, by their names in the structure."""
    lines = [
        f"  {name}: {kind(theirs[name])} in the checkpoint, {kind(ours[name])} here"
        for name in theirs
        if name in ours and kind(theirs[name]) != kind(ours[name])
    ]
    lines += [f"  {name}: {kind(theirs[name])} in the checkpoint, nothing here" for name in theirs if name not in ours]
    lines += [f"  {name}: nothing in the checkpoint, {kind(ours[name])} here" for name in ours if name not in theirs]
    if lines:
        more = [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise ValueError(
            "\n".join([f"The checkpoint {where} does not fit:", *lines[:MOST_LINES], *more, "Nothing was restored."])
        )


def kind(of: Any) -> str:
    return f"{tuple(of.shape)} {of.dtype}"


def check_names(where: str, theirs: Collection[str], ours: Collection[str], partial: bool) -> None:
    """Of whole objects."""
    missing, left = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if missing:
        raise ValueError(
            f"The checkpoint {where} holds no {' and no '.join(missing)}, only {', '.join(sorted(theirs))}. Nothing was restored."
        )
    if left and not partial:
        raise ValueError(
            f"The checkpoint {where} also holds {', '.join(left)}. Give {left[0]}= to Checkpoint as well, or write restore(path, partial=True) "
            f"to leave it, where this is not trained on. Nothing was restored."
        )
