"""One checkpoint on disk, and its record, by which every bit is checked when the checkpoint is read."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from unisono._src.checkpoint.folders import find_checkpoints
from unisono._src.checkpoint.host_copies import digest_array
from unisono._src.processes.activity import get_activity as progress
from unisono._src.processes.agreement import get_agreement
from unisono._src.typing import Json

FORMAT = 2

Record: TypeAlias = dict[str, Json]
"""The description of a checkpoint beside its arrays, in JSON."""


class DamagedError(ValueError):
    """A checkpoint is not what was written, or is of a format that no code reads any more."""


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was read and found good."""

    path: Path
    arrays: dict[str, np.ndarray]
    record: Record


def load_newest(paths: list[Path]) -> LoadedCheckpoint | None:
    """Return the first good checkpoint. Damaged ones are left in place, and named in a warning."""
    damaged: list[str] = []
    for path in paths:
        try:
            loaded = load_checkpoint(path)
        except DamagedError as error:
            damaged.append(str(error))
            continue
        if damaged:
            warnings.warn(f"{' '.join(damaged)} It was left in place; {path} is used, the newest good one.", stacklevel=6)
        return loaded
    if damaged:
        raise DamagedError(f"{' '.join(damaged)} No other checkpoint is there. Move {paths[0].parent} away to begin anew.")
    return None


def find_newest_beside(path: Path) -> Path | None:
    """Return the newest other checkpoint of the same name that is good; warn of no damaged one."""
    name = path.name.rpartition("_")[0]
    folders = find_checkpoints(path.parent, name)
    others = sorted(((number, other) for series, number, other in folders if series == name and other != path), reverse=True)
    for _, other in others:
        with contextlib.suppress(DamagedError):
            return load_checkpoint(other).path
    return None


def load_chosen_by_first(path: Path) -> LoadedCheckpoint:
    """Return, in another process, the checkpoint from which process 0 goes on."""
    if not path.exists():
        raise FileNotFoundError(
            f"Process 0 goes on from the checkpoint {path}, which process {get_agreement().number} does not find. Name a directory that all "
            f"processes share."
        )
    return load_checkpoint(path)


def load_checkpoint(path: str | os.PathLike[str]) -> LoadedCheckpoint:
    """Read a checkpoint and check every bit of it."""
    path = Path(path).absolute()
    try:
        with progress().report_busy("reading a checkpoint"), silence_loggers():
            return load_and_check(path)
    except (DamagedError, ImportError):  # an Orbax that cannot be imported says nothing about the checkpoint
        raise
    except Exception as error:
        raise DamagedError(f"The checkpoint {path} is damaged: {summarize_error(error)}.") from error


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
    like = {name: np.empty(shape, find_dtype(dtype)) for name, (shape, dtype, _) in described.items()}
    filled = {name: array for name, array in like.items() if array.size}
    loaded = orbax_private.load_arrays(str(path), filled) if filled else {}
    arrays = {name: np.asarray(loaded[name]) if array.size else array for name, array in like.items()}
    wrong = [name for name, (_, _, written) in described.items() if digest_array(arrays[name]) != written]
    if wrong:
        raise DamagedError(f"The checkpoint {path} is damaged: {wrong[0]} has other bits than were written.")
    return LoadedCheckpoint(path, arrays, record)


@contextlib.contextmanager
def silence_loggers() -> Iterator[None]:
    """Silence Orbax and asyncio within the block: the error is said once, by us, and they log it for every array and task."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        yield
    except Exception:
        gc.collect()  # tasks log when they are collected
        raise
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def describe_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, list[Json]]:
    """Return the shape, the dtype and the digest of each array."""
    return {name: [list(array.shape), str(array.dtype), digest_array(array)] for name, array in arrays.items()}


def find_dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def make_record(arrays: Mapping[str, np.ndarray], more: Mapping[str, Json]) -> Record:
    """Return the record of these arrays, as JSON gives it back, with its digest."""
    record = json.loads(json.dumps({**more, "format": FORMAT, "arrays": describe_arrays(arrays)}))
    return record | {"seal": digest_record(record)}


def digest_record(record: Mapping[str, Json]) -> str:
    text = json.dumps({key: value for key, value in record.items() if key != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def summarize_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else 'no text'}"
