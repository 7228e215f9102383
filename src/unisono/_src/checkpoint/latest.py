"""The newest checkpoint of a directory: of `un.Checkpoint`, or of Keras' ModelCheckpoint."""

from __future__ import annotations

import contextlib
import os
import warnings
import zipfile
from pathlib import Path

import h5py

from unisono._src.checkpoint.reading import METADATA, DamagedError, find_checkpoints, load_checkpoint, read_first_good
from unisono._src.checkpoint.replay_start import select_starts
from unisono._src.checkpoint.writer import wait_for_writers
from unisono._src.near_names import says_near_names
from unisono._src.processes.agreement import get_agreement


@says_near_names
def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest good checkpoint in a directory; None where there is none.

    Args:
        directory: Where `un.Checkpoint` has saved, as a directory or as the prefix that `save` was given, or where
            keras.callbacks.ModelCheckpoint has written `.weights.h5` or `.keras` files.

    Damaged checkpoints are left in place, and named in a warning. Another process may write and remove checkpoints meanwhile. Of several
    processes, process 0 looks.
    """
    place = Path(directory).absolute()

    def find_newest() -> str | None:
        wait_for_writers()
        newest, damaged = read_first_good(lambda: select_starts(list_newest_first(place)), check_file)
        said = " ".join(damaged.values())
        if damaged and newest is None:
            raise DamagedError(f"{said} No good checkpoint is left in {place}.")
        if damaged:
            warnings.warn(f"{said} It was left in place; {newest} is the newest good one.", stacklevel=5)
        return newest

    return get_agreement().of_first(f"the newest checkpoint in {directory}", find_newest)


def list_newest_first(place: Path) -> list[Path]:
    """Return the checkpoints of a directory or a prefix: ours of one name by their numbers, since a copy has another time; all others by
    the time of writing."""
    if place.is_dir():
        files = [*place.glob("*.weights.h5"), *place.glob("*.keras")]
        candidates = find_checkpoints(place) + [(file.name, parse_number(file), file) for file in files]
    else:
        candidates = find_checkpoints(place.parent, place.name)
    newest: dict[str, int] = {}
    for series, _, path in candidates:
        newest[series] = max(newest.get(series, 0), read_write_time(path))
    candidates.sort(key=lambda candidate: (newest[candidate[0]], candidate[1], read_write_time(candidate[2])), reverse=True)
    return [path for _, _, path in candidates]


def parse_number(file: Path) -> int:
    """Return the number in the name of a file like `model_3.weights.h5`; 0 if it has none."""
    number = file.name.partition(".")[0].rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def read_write_time(path: Path) -> int:
    """Return when a checkpoint was written, in nanoseconds; 0 if it is gone by now."""
    for file in (path / METADATA, path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return file.stat().st_mtime_ns
    return 0


def check_file(path: Path) -> str:
    """Read a checkpoint or a file of Keras, and return its path; raise DamagedError if it is not what was written."""
    try:
        if path.is_dir():
            load_checkpoint(path)
        elif path.suffix == ".h5":
            with h5py.File(path) as file:
                file.visititems(lambda _, item: item[()] if isinstance(item, h5py.Dataset) else None)
        else:
            with zipfile.ZipFile(path) as archive:
                wrong = archive.testzip()
                if wrong is not None:
                    raise zipfile.BadZipFile(f"{wrong} has other bits than were written")
    except (DamagedError, ImportError):
        raise
    except Exception as error:  # a flipped bit leads the readers of Keras' files to any error
        raise DamagedError(f"The file {path} is damaged: {error}.") from error
    return str(path)
