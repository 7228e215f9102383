"""One checkpoint on disk: what stands in its record, by which every bit is checked when it is read."""

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
from typing import Any, NamedTuple

import numpy as np

from unisono._src.checkpoint.folders import found_in
from unisono._src.checkpoint.host_copies import digest
from unisono._src.processes.agreement import current
from unisono._src.processes.progress import current as progress

FORMAT = 2


class DamagedError(ValueError):
    """A checkpoint is not what was written, or is of a format that nobody reads any more."""


class Loaded(NamedTuple):
    """A checkpoint that was read and found good."""

    path: Path
    arrays: dict[str, np.ndarray]
    record: dict[str, Any]


def newest_of(paths: list[Path]) -> Loaded | None:
    """The first that is good. Others stay where they are and are named in a warning."""
    damaged: list[str] = []
    for path in paths:
        try:
            loaded = load(path)
        except DamagedError as error:
            damaged.append(str(error))
            continue
        if damaged:
            warnings.warn(f"{' '.join(damaged)} It was left in place; {path} is used, the newest good one.", stacklevel=6)
        return loaded
    if damaged:
        raise DamagedError(f"{' '.join(damaged)} No other checkpoint is there. Move {paths[0].parent} away to begin anew.")
    return None


def newest_beside(path: Path) -> Path | None:
    """The newest good checkpoint of the same name; nothing is said of others."""
    name = path.name.rpartition("_")[0]
    found = found_in(path.parent, name)
    of_name = sorted(((number, other) for n, number, other in found if n == name and other != path), reverse=True)
    for _, other in of_name:
        with contextlib.suppress(DamagedError):
            return load(other).path
    return None


def load_as_first(path: Path) -> Loaded:
    """What process 0 goes on from, in another one."""
    if not path.exists():
        raise FileNotFoundError(
            f"Process 0 goes on from the checkpoint {path}, which process {current().number} does not find. Name a directory that all "
            f"processes share."
        )
    return load(path)


def load(path: str | os.PathLike[str]) -> Loaded:
    """Reads a checkpoint and checks every bit of it."""
    path = Path(path).absolute()
    try:
        with progress().busy("reading a checkpoint"), quiet():
            return checked(path)
    except (DamagedError, ImportError):  # Orbax, where it cannot be imported, says nothing of the checkpoint
        raise
    except Exception as error:
        raise DamagedError(f"The checkpoint {path} is damaged: {first_line(error)}.") from error


def checked(path: Path) -> Loaded:
    from unisono._src.checkpoint import orbax_private

    record = orbax_private.record_of(str(path))
    if not isinstance(record, dict) or record.get("seal") != seal(record):
        raise DamagedError(f"The checkpoint {path} is damaged: its record is not what was written.")
    if record["format"] != FORMAT:
        raise DamagedError(
            f"The checkpoint {path} cannot be read: it has format {record['format']}, and this version of Unisono reads {FORMAT} alone."
        )
    described_there = record["arrays"]
    like = {name: np.empty(shape, dtype_named(dtype)) for name, (shape, dtype, _) in described_there.items()}
    filled = {name: array for name, array in like.items() if array.size}
    read = orbax_private.read(str(path), filled) if filled else {}
    arrays = {name: np.asarray(read[name]) if array.size else array for name, array in like.items()}
    wrong = [name for name, (_, _, of) in described_there.items() if digest(arrays[name]) != of]
    if wrong:
        raise DamagedError(f"The checkpoint {path} is damaged: {wrong[0]} has other bits than were written.")
    return Loaded(path, arrays, record)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What fails to be read is said once, by us: Orbax logs it for every array, and asyncio for every task."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        yield
    except Exception:
        gc.collect()  # tasks speak when they are collected
        raise
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def described(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Shape, dtype and digest of each."""
    return {name: [list(array.shape), str(array.dtype), digest(array)] for name, array in arrays.items()}


def dtype_named(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def recorded(arrays: Mapping[str, np.ndarray], more: Mapping[str, Any]) -> dict[str, Any]:
    """The record of these arrays, as JSON gives it back, with its digest."""
    record = json.loads(json.dumps({**more, "format": FORMAT, "arrays": described(arrays)}))
    return record | {"seal": seal(record)}


def seal(record: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in record.items() if key != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else 'no text'}"
