"""The newest checkpoint of a directory, ours or one of Keras' ModelCheckpoint."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py

from unisono.checkpoint.store import DamagedError, found_in, load
from unisono.checkpoint.writer import wait_for_all


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The path of the newest good checkpoint in a directory; None where there is none.

    Args:
        directory: Where `un.Checkpoint` has saved, as a directory or as the prefix that `save` was given, or where
            keras.callbacks.ModelCheckpoint has written `.weights.h5` or `.keras` files.

    Checkpoints that were damaged are left where they are, and named in a warning.
    """
    wait_for_all()
    place = Path(directory).absolute()
    damaged = []
    for path, check in sorted(candidates(place), key=lambda candidate: written(candidate[0]), reverse=True):
        try:
            check(path)
        except (DamagedError, OSError, zipfile.BadZipFile) as error:
            damaged.append(str(error) if isinstance(error, DamagedError) else f"The file {path} is damaged: {error}.")
            continue
        if damaged:
            warnings.warn(f"{' '.join(damaged)} It was left in place; {path} is the newest good one.", stacklevel=2)
        return str(path)
    if damaged:
        raise DamagedError(f"{' '.join(damaged)} No good checkpoint is left in {place}.")
    return None


def candidates(place: Path) -> list[tuple[Path, Callable[[Path], object]]]:
    """(path, what reads it and raises where it is damaged)."""
    if not place.is_dir():
        return [(path, load) for name, _, path in found_in(place.parent) if name == place.name]
    checks: dict[str, Callable[[Path], object]] = {"*.weights.h5": check_h5, "*.keras": check_zip}
    files = [(path, check) for pattern, check in checks.items() for path in place.glob(pattern)]
    return [(path, load) for _, _, path in found_in(place)] + files


def written(path: Path) -> tuple[int, int]:
    """When, in nanoseconds; of two at one moment the one with the higher number."""
    number = path.name.rpartition("_")[2]
    marker = path / "_CHECKPOINT_METADATA" if path.is_dir() else path
    return marker.stat().st_mtime_ns, int(number) if number.isdigit() else 0


def check_h5(path: Path) -> None:
    with h5py.File(path) as file:
        file.visititems(lambda _, item: item[()] if isinstance(item, h5py.Dataset) else None)


def check_zip(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        wrong = file.testzip()
    if wrong is not None:
        raise zipfile.BadZipFile(f"{wrong} has other bits than were written")
