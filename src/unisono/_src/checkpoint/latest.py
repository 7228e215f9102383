"""The newest checkpoint of a directory: of `un.Checkpoint`, or of Keras' ModelCheckpoint."""

from __future__ import annotations

import contextlib
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py

from unisono._src.checkpoint.folders import METADATA, find_checkpoints
from unisono._src.checkpoint.reading import DamagedError, load_checkpoint
from unisono._src.checkpoint.writer import wait_for_writers
from unisono._src.near_names import says_near_names
from unisono._src.processes.agreement import get_agreement


@says_near_names
def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest good checkpoint in a directory; None where there is none.

    Args:
        directory: Where `un.Checkpoint` has saved, as a directory or as the prefix that `save` was given, or where
            keras.callbacks.ModelCheckpoint has written `.weights.h5` or `.keras` files.

    Damaged checkpoints are left in place, and named in a warning. Of several processes, process 0 looks.
    """
    return get_agreement().of_first(f"the newest checkpoint in {directory}", lambda: find_newest(directory))


def find_newest(directory: str | os.PathLike[str]) -> str | None:
    wait_for_writers()
    place = Path(directory).absolute()
    damaged = []
    for path, check in sort_newest_first(list_candidates(place)):
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


def list_candidates(place: Path) -> list[Candidate]:
    """Return the path of each checkpoint, with a function that reads it and raises if it is damaged."""
    if not place.is_dir():
        return [(path, load_checkpoint) for name, _, path in find_checkpoints(place.parent, place.name) if name == place.name]
    checks: dict[str, Callable[[Path], object]] = {"*.weights.h5": check_h5, "*.keras": check_zip}
    files = [(path, check) for pattern, check in checks.items() for path in place.glob(pattern)]
    return [(path, load_checkpoint) for _, _, path in find_checkpoints(place)] + files


def sort_newest_first(candidates: list[Candidate]) -> list[Candidate]:
    """Sort our checkpoints of one name by their numbers, since a copy has another time; all others by the time of writing."""
    newest: dict[str, int] = {}
    for path, _ in candidates:
        newest[strip_number(path)] = max(newest.get(strip_number(path), 0), read_write_time(path))
    return sorted(
        candidates,
        key=lambda entry: (newest[strip_number(entry[0])], parse_number(entry[0]), read_write_time(entry[0])),
        reverse=True,
    )


def strip_number(path: Path) -> str:
    """Return the name that checkpoints of one series share; of a file of Keras, the name of the file."""
    return path.name.rpartition("_")[0] if path.is_dir() else path.name


def parse_number(path: Path) -> int:
    number = path.name.partition(".")[0].rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def read_write_time(path: Path) -> int:
    """Return when a checkpoint was written, in nanoseconds."""
    metadata = path / METADATA
    return (metadata if metadata.exists() else path).stat().st_mtime_ns


@contextlib.contextmanager
def name_damaged_file(path: Path) -> Iterator[None]:
    """Raise any error of the block as damage of the file: a flipped bit leads the readers of Keras' files to any error."""
    try:
        yield
    except Exception as error:
        raise DamagedError(f"The file {path} is damaged: {error}.") from error


def check_h5(path: Path) -> None:
    with name_damaged_file(path), h5py.File(path) as file:
        file.visititems(lambda _, item: item[()] if isinstance(item, h5py.Dataset) else None)


def check_zip(path: Path) -> None:
    with name_damaged_file(path), zipfile.ZipFile(path) as file:
        wrong = file.testzip()
        if wrong is not None:
            raise zipfile.BadZipFile(f"{wrong} has other bits than were written")
