"""The check that a checkpoint fits the objects that take it: every difference is named, with both sides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

MOST_LINES = 20


class ArrayLike(Protocol):
    """An array or a variable: it has a shape and a dtype."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...


def check_same_arrays(where: str, theirs: Mapping[str, ArrayLike], ours: Mapping[str, ArrayLike]) -> None:
    """Refuse a checkpoint whose arrays have other names, shapes or dtypes than the arrays here."""
    lines = [
        f"  {name}: {describe_array(theirs[name])} in the checkpoint, {describe_array(ours[name])} here"
        for name in theirs
        if name in ours and describe_array(theirs[name]) != describe_array(ours[name])
    ]
    lines += [f"  {name}: {describe_array(theirs[name])} in the checkpoint, nothing here" for name in theirs if name not in ours]
    lines += [f"  {name}: nothing in the checkpoint, {describe_array(ours[name])} here" for name in ours if name not in theirs]
    if lines:
        more = [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise ValueError(
            "\n".join([f"The checkpoint {where} does not fit:", *lines[:MOST_LINES], *more, "Nothing was restored."])
        )


def describe_array(array: ArrayLike) -> str:
    return f"{tuple(array.shape)} {array.dtype}"


def check_objects(where: str, theirs: Collection[str], ours: Collection[str], partial: bool) -> None:
    """Refuse a checkpoint that lacks an object; and one that has more objects, unless it may be restored in part."""
    missing = sorted(set(ours) - set(theirs))
    left = sorted(set(theirs) - set(ours))
    if missing:
        raise ValueError(
            f"The checkpoint {where} holds no {' and no '.join(missing)}, only {', '.join(sorted(theirs))}. Nothing was restored."
        )
    if left and not partial:
        raise ValueError(
            f"The checkpoint {where} also holds {', '.join(left)}. Give {left[0]}= to Checkpoint as well, or write restore(path, partial=True) "
            f"to leave it, where this is not trained on. Nothing was restored."
        )
