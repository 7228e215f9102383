"""The newest checkpoint of a directory, ours or one of Keras' ModelCheckpoint."""

from __future__ import annotations

import contextlib
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py

from unisono._src.checkpoint.folders import METADATA, found_in
from unisono._src.checkpoint.reading import DamagedError, load
from unisono._src.checkpoint.writer import wait_for_all
from unisono._src.near_names import says_near_names
from unisono._src.processes.agreement import current


@says_near_names
def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The path of the newest good checkpoint in a directory; None where there is none.

    Args:
        directory: Where `un.Checkpoint` has saved, as a directory or as the prefix that `save` was given, or where
            keras.callbacks.ModelCheckpoint has written `.weights.h5` or `.keras` files.

    Checkpoints that were damaged are left where they are, and named in a warning. Of several processes the first one looks.
    """
    return current().of_first(f"the newest checkpoint in {directory}", lambda: newest_in(directory))


def newest_in(directory: str | os.PathLike[str]) -> str | None:
    wait_for_all()
    place = Path(directory).absolute()
    damaged = []
    for path, check in newest_first(candidates(place)):
        try:
            check(path)
        except (DamagedError, OSError) as error:
            damaged.append(str(error) if isinstance(error, DamagedError) else f"The file {path} is damaged: {error}.")
            continue
        if damaged:
            warnings.warn(f"{' '.join(damaged)} It was left in place; {path} is the newest good one.", stacklevel=6)
        return str(path)
    if damaged:
        raise DamagedError(f"{' '.join(damaged)} No good checkpoint is left in {place}.")
    return None


Candidate = tuple[Path, Callable[[Path], object]]


def candidates(place: Path) -> list[Candidate]:
    """(path, what reads it and raises where it is damaged)."""
    if not place.is_dir():
        return [(path, load) for name, _, path in found_in(place.parent, place.name) if name == place.name]
    checks: dict[str, Callable[[Path], object]] = {"*.weights.h5": check_h5, "*.keras": check_zip}
    files = [(path, check) for pattern, check in checks.items() for path in place.glob(pattern)]
    return [(path, load) for _, _, path in found_in(place)] + files


def newest_first(found: list[Candidate]) -> list[Candidate]:
    """Of our checkpoints of one name by their numbers, since copies have other times; else by the time of writing."""
    newest: dict[str, int] = {}
    for path, _ in found:
        newest[series(path)] = max(newest.get(series(path), 0), written(path))
    return sorted(found, key=lambda of: (newest[series(of[0])], number_of(of[0]), written(of[0])), reverse=True)


def series(path: Path) -> str:
    """What the checkpoints of one name share; a file of Keras' is alone."""
    return path.name.rpartition("_")[0] if path.is_dir() else path.name


def number_of(path: Path) -> int:
    number = path.name.partition(".")[0].rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def written(path: Path) -> int:
    """When, in nanoseconds."""
    metadata = path / METADATA
    return (metadata if metadata.exists() else path).stat().st_mtime_ns


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """The readers of Keras' files raise whatever a flipped bit leads them to."""
    try:
        yield
    except Exception as error:
        raise DamagedError(f"The file {path} is damaged: {error}.") from error


def check_h5(path: Path) -> None:
    with naming(path), h5py.File(path) as file:
        file.visititems(lambda _, item: item[()] if isinstance(item, h5py.Dataset) else None)


def check_zip(path: Path) -> None:
    with naming(path), zipfile.ZipFile(path) as file:
        wrong = file.testzip()
        if wrong is not None:
            raise zipfile.BadZipFile(f"{wrong} has other bits than were written")
