"""The checkpoints of a directory, and the newest good one.

It may be ours or of Keras' ModelCheckpoint. Errors describe what is there if there is none.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import h5py

from unisono._src.keras.checkpoint import files
from unisono._src.keras.checkpoint.background import wait_for_writers
from unisono._src.keras.checkpoint.files import DamagedError, LoadedCheckpoint, load_checkpoint
from unisono._src.keras.checkpoint.storage import Place, StorageError, find_place
from unisono._src.near_names import says_near_names
from unisono._src.processes.agreement import get_agreement
from unisono._src.processes.names import get_replayed_step

T = TypeVar("T")

KERAS_FILES = (".weights.h5", ".keras")

MOST_NAMES = 5
"""Names of a folder that an error lists."""


@says_near_names
def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Find the newest good checkpoint in a directory. It is None if there is none.

    Args:
        directory: Where `un.Checkpoint` has saved, as a directory or as the prefix that `save` was given, or where
            keras.callbacks.ModelCheckpoint has written `.weights.h5` or `.keras` files; also with a protocol.

    Damaged checkpoints are left in place, and named in a warning. Another process may write and remove checkpoints meanwhile. Of several
    processes, process 0 looks.
    """
    place = find_place(directory)

    def find_newest() -> str | None:
        wait_for_writers()
        return read_newest(place, lambda: list_newest_first(place), check_path)

    return get_agreement().of_first(f"the newest checkpoint in {directory}", find_newest)


def find_checkpoints(directory: Place, name: str | None = None) -> list[tuple[str, int, Place]]:
    """List the checkpoints that were written whole, with names and numbers.

    Each item is (name, number, path), by name and number. Files of a checkpoint may be gone by now. With a name, all folders of this name count.
    Without one, a name counts if any of its folders looks like a checkpoint.
    """
    matches = [re.fullmatch(r"(.+)_(\d+)", entry) for entry in directory.list_names()]
    found = [(match[1], int(match[2]), directory / match[0]) for match in matches if match]
    folders = [entry for entry in found if name in (None, entry[0]) and entry[2].is_folder()]
    ours = {series for series, _, path in folders if series == name or files.looks_like_checkpoint(path)}
    return sorted((entry for entry in folders if entry[0] in ours), key=lambda entry: entry[:2])


def read_newest(directory: Place, list_paths: Callable[[], Iterable[Place]], read: Callable[[Place], T]) -> T | None:
    """Read the first good path, and give what `read` returns.

    It is None if there is no path. Damaged checkpoints are left in place, and named in a warning. A process that replays a step
    starts from a checkpoint from before the step.
    """
    step = get_replayed_step()

    def list_starts() -> list[Place]:
        # Files of Keras do not say how many steps came before them: no replay starts from them.
        return [path for path in list_paths() if step is None or files.count_steps(path) <= step]

    found, damaged = read_first_good(list_starts, read)
    if damaged and found is None:
        raise DamagedError(f"{' '.join(damaged.values())} No good checkpoint is left in {directory}. Move it away to begin anew.")
    if found is None:
        return None
    path, content = found
    if damaged:
        warnings.warn(f"{' '.join(damaged.values())} It was left in place; {path} is the newest good one.", stacklevel=6)
    return content


def read_first_good(
    list_paths: Callable[[], Sequence[Place]], read: Callable[[Place], T]
) -> tuple[tuple[Place, T] | None, dict[Place, str]]:
    """Read the first path that is not damaged.

    The result is ((path, what `read` returns), the error text of each damaged path before it). The process that writes the
    checkpoints may remove old ones meanwhile: a path that is gone is not damaged. If all are gone, newer ones have taken their
    place, and the paths are listed again.
    """
    damaged: dict[Place, str] = {}
    while (paths := list_paths()) and not damaged:
        for path in paths:
            try:
                return (path, read(path)), damaged
            except DamagedError as error:
                if path.is_there():
                    damaged[path] = str(error)
    return None, damaged


def load_chosen_by_first(path: Place) -> LoadedCheckpoint:
    """Load the checkpoint that process 0 chose. It is called in other processes."""
    if not path.is_there():
        raise FileNotFoundError(
            f"Process 0 goes on from the checkpoint {path}, which process {get_agreement().number} does not find. Name a directory that all "
            f"processes share."
        )
    return load_checkpoint(path)


def list_newest_first(place: Place) -> list[Place]:
    """List the checkpoints of a directory or a prefix, the newest first.

    Ours of one name are sorted by their numbers, since a copy has another time. All others are sorted by the time of writing.
    """
    if place.is_folder():
        names = [name for name in place.list_names() if name.endswith(KERAS_FILES)]
        candidates = find_checkpoints(place) + [(name, parse_number(name), place / name) for name in names]
    else:
        candidates = find_checkpoints(place.parent, place.name)
    times = {path: files.read_write_time(path) for _, _, path in candidates}
    newest: dict[str, int] = {}
    for series, _, path in candidates:
        newest[series] = max(newest.get(series, 0), times[path])
    candidates.sort(key=lambda candidate: (newest[candidate[0]], candidate[1], times[candidate[2]]), reverse=True)
    return [path for _, _, path in candidates]


def parse_number(name: str) -> int:
    """Parse the number in a file name like `model_3.weights.h5`. It is 0 if there is none."""
    number = name.partition(".")[0].rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def check_path(path: Place) -> str:
    """Read a checkpoint or a Keras file, and give its path. DamagedError is raised if it is not what was written."""
    if path.is_folder():
        return str(files.load_checkpoint(path).path)
    try:
        with path.open_file() as file:
            if path.name.endswith(".h5"):
                with h5py.File(file) as groups:
                    groups.visititems(lambda _, item: item[()] if isinstance(item, h5py.Dataset) else None)
            elif wrong := zipfile.ZipFile(file).testzip():
                raise zipfile.BadZipFile(f"{wrong} has other bits than were written")
    except StorageError:
        raise
    except Exception as error:  # a flipped bit leads the readers of Keras' files to any error
        raise DamagedError(f"The file {path} is damaged: {error}.") from error
    return str(path)


def refuse_missing(path: Place) -> None:
    """Refuse a path that is no checkpoint's folder.

    There may be nothing, a folder of checkpoints, or a file. Damaged checkpoints are not refused here.
    """
    if not path.is_there():
        raise FileNotFoundError(f"The checkpoint {path} is not there. {describe_neighbours(path)}")
    if not path.is_folder():
        raise ValueError(
            f"{path} is a file, and un.Checkpoint writes folders. Write model.load_weights(path) for a .weights.h5 file of Keras, and "
            f"keras.saving.load_model(path) for a .keras file."
        )
    if not files.looks_like_checkpoint(path) and find_checkpoints(path):
        raise ValueError(
            f"{path} is a folder of checkpoints. Write restore(un.latest_checkpoint({str(path)!r})) for the newest in it."
        )


def describe_neighbours(path: Place) -> str:
    """List what lies beside a missing path, near names first.

    If its folder is missing too, the nearest folder that exists is listed.
    """
    folder = path.parent.find_folder()
    beside = "" if folder == path.parent else f"There is no folder {path.parent}. "
    checkpoints = [found.name for _, _, found in reversed(find_checkpoints(folder))]
    names = checkpoints or folder.list_names()
    near = difflib.get_close_matches(str(path).removeprefix(str(folder)).lstrip("/").partition("/")[0], names, n=MOST_NAMES)
    listed = [*near, *(name for name in names if name not in near)][:MOST_NAMES]
    more = f" and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
    advice = f" Write restore(un.latest_checkpoint({str(folder)!r})) for the newest." if checkpoints else ""
    return f"{beside}In {folder} there {'are' if len(listed) > 1 else 'is'} {', '.join(listed) or 'nothing'}{more}.{advice}"
