"""One checkpoint on disk, and its record, by which every bit is checked when the checkpoint is read."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from unisono._src.processes.activity import get_activity
from unisono._src.typing import Json

T = TypeVar("T")

FORMAT = 2

ARRAYS = "arrays"
METADATA = "_CHECKPOINT_METADATA"
"""What Orbax leaves in the folder of a checkpoint."""

Record: TypeAlias = dict[str, Json]
"""The description of a checkpoint beside its arrays, in JSON."""


class DamagedError(ValueError):
    """A checkpoint is not what was written, or is of a format that no code reads any more."""


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was read and found good."""

    path: Path
    arrays: dict[str, np.ndarray]
    record: Record


def find_checkpoints(directory: Path, name: str | None = None) -> list[tuple[str, int, Path]]:
    """Return the name, the number and the path of each checkpoint that was written whole; parts of it may be gone by now.

    All folders of the name that is given count; without one, all of each name of which a folder looks like a checkpoint.
    """
    matches = [(re.fullmatch(r"(.+)_(\d+)", entry.name), entry) for entry in directory.iterdir()] if directory.is_dir() else []
    folders = [(match[1], int(match[2]), entry) for match, entry in matches if match and entry.is_dir()]
    ours = {series for series, _, entry in folders if (entry / METADATA).exists() or (entry / ARRAYS).exists()}
    return [folder for folder in folders if (folder[0] in ours if name is None else folder[0] == name)]


def read_first_good(list_paths: Callable[[], Sequence[Path]], read: Callable[[Path], T]) -> tuple[T | None, dict[Path, str]]:
    """Return what `read` returns of the first path that is not damaged, and what there is to say of each damaged path before it.

    The process that writes the checkpoints may remove old ones meanwhile: a path that is gone is not damaged. Where all are gone, newer ones
    have taken their place, and the paths are listed again.
    """
    while paths := list_paths():
        damaged: dict[Path, str] = {}
        for path in paths:
            try:
                return read(path), damaged
            except DamagedError as error:
                if os.path.lexists(path):
                    damaged[path] = str(error)
        if damaged:
            return None, damaged
    return None, {}


def load_checkpoint(path: str | os.PathLike[str]) -> LoadedCheckpoint:
    """Read a checkpoint and check every bit of it."""
    path = Path(path).absolute()
    try:
        with get_activity().report_busy("reading a checkpoint"), silence_orbax():
            return load_and_check(path)
    except (DamagedError, ImportError):  # an Orbax that cannot be imported says nothing about the checkpoint
        raise
    except Exception as error:
        raise DamagedError(f"The checkpoint {path} is damaged: {summarize_error(error)}.") from error


def count_steps(path: Path) -> float:
    """Return the steps that a training had begun when its checkpoint was written; infinity where the checkpoint does not say it."""
    from unisono._src.checkpoint import orbax_private

    try:
        with silence_orbax():
            record = orbax_private.read_record(str(path))
    except Exception:  # whatever Orbax makes of what is no checkpoint, or of one that is damaged
        return math.inf
    steps = record.get("steps") if isinstance(record, dict) else None
    return steps if isinstance(steps, int) else math.inf


def load_and_check(path: Path) -> LoadedCheckpoint:
    from unisono._src.checkpoint import orbax_private

    record = orbax_private.read_record(str(path))
    if not isinstance(record, dict) or record.get("seal") != digest_record(record):
        raise DamagedError(f"The checkpoint {path} is damaged: its record is not what was written.")
    if record["format"] != FORMAT:
        raise DamagedError(
            f"The checkpoint {path} cannot be read: it has format {record['format']}, and this version of Unisono reads {FORMAT} alone."
        )
    described = record["arrays"]
    like = {name: np.empty(shape, np.dtype(dtype)) for name, (shape, dtype, _) in described.items()}
    filled = {name: array for name, array in like.items() if array.size}
    loaded = orbax_private.load_arrays(str(path), filled) if filled else {}
    arrays = {name: np.asarray(loaded[name]) if array.size else array for name, array in like.items()}
    wrong = [name for name, (_, _, written) in described.items() if digest_array(arrays[name]) != written]
    if wrong:
        raise DamagedError(f"The checkpoint {path} is damaged: {wrong[0]} has other bits than were written.")
    return LoadedCheckpoint(path, arrays, record)


@contextlib.contextmanager
def silence_orbax() -> Iterator[None]:
    """Silence what Orbax logs of an error within the block, once for every array and task: the error is said once, by us."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]

    def is_logged(record: logging.LogRecord) -> bool:
        """Return whether the record is logged. A filter of this block alone: another thread may enter and leave a block meanwhile."""
        return not is_of_orbax(record)

    for logger in loggers:
        logger.addFilter(is_logged)
    try:
        yield
    except Exception:
        gc.collect()  # tasks log when they are collected
        raise
    finally:
        for logger in loggers:
            logger.removeFilter(is_logged)


def is_of_orbax(record: logging.LogRecord) -> bool:
    """Return whether Orbax has logged this, or asyncio of an error for which nobody waits, as it does for tasks of Orbax."""
    return f"{os.sep}orbax{os.sep}" in record.pathname or "exception was never retrieved" in record.getMessage()


def make_record(arrays: Mapping[str, np.ndarray], more: Mapping[str, Json]) -> Record:
    """Return the record of these arrays, as JSON gives it back, with its digest."""
    described = {name: [array.shape, str(array.dtype), digest_array(array)] for name, array in arrays.items()}
    record = json.loads(json.dumps({**more, "format": FORMAT, "arrays": described}))
    return record | {"seal": digest_record(record)}


def digest_record(record: Mapping[str, Json]) -> str:
    text = json.dumps({key: value for key, value in record.items() if key != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_array(array: np.ndarray) -> str:
    digester = hashlib.sha256(f"{array.shape} {array.dtype}\n".encode())
    digester.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digester.hexdigest()[:32]


def summarize_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else 'no text'}"
