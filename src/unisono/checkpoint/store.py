"""Numbered checkpoints in a directory: arrays and a record each, written by Orbax, and checked when they are read.

Orbax writes into a folder of another name and renames it in the end, so that a checkpoint is there as a whole or not at all.
What happens to it afterwards shows in its digests: of each array, and of the record that holds them.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from unisono.checkpoint.arrays import digest
from unisono.checkpoint.folders import ARRAYS, METADATA, found_in
from unisono.checkpoint.orbax_seam import alone
from unisono.checkpoint.writer import Writer, wait_for_all
from unisono.cluster.agreement import current
from unisono.cluster.watch.progress import current as progress

policies = ocp.training.preservation_policies

FORMAT = 2
NOTHING = "nothing"
"""The name of an array that stands for none: Orbax writes no empty checkpoints."""

TEMPORARY = ".orbax-checkpoint-tmp"
"""The end of the name under which Orbax writes."""

Keep = int | Any
"""So many newest checkpoints, or a policy of `orbax.checkpoint.experimental.v1.training.preservation_policies`."""


class DamagedError(ValueError):
    """A checkpoint is not what was written, or is of a format that nobody reads any more."""


class Counted(NamedTuple):
    """A checkpoint, as policies see it."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None = None


class Loaded(NamedTuple):
    """A checkpoint that was read and found good."""

    path: Path
    arrays: dict[str, np.ndarray]
    record: dict[str, Any]


class Store:
    """The checkpoints of one directory that have one name, as in `name_1`, `name_2`."""

    def __init__(self, directory: str | os.PathLike[str], name: str = "ckpt", keep: Keep = None) -> None:
        self.directory = Path(directory).absolute()
        self.name = name
        self.keep = keep
        self._writer = Writer()
        self._known: dict[int, bool] = {}
        """Whether checkpoints are good: those that this process has written or read."""

    def save(self, number: int, arrays: Callable[[], Mapping[str, np.ndarray]], record: Callable[[Any], dict[str, Any]]) -> Path:
        """Writes in the background; the writing before it must have ended well, or its error is raised here.

        `arrays()` gives them on the host, and `record(arrays)` what else is to be known; both are called in the background.
        """
        path = self.path(number)
        if not self.writes:
            return path

        def write() -> None:
            found = dict(arrays())
            self._write(number, found, sealed(record(found) | {"format": FORMAT, "arrays": described(found)}))

        self._writer.start(write)
        return path

    def wait(self) -> None:
        """Until the last checkpoint is on disk; raises what went wrong."""
        self._writer.wait()

    def join(self) -> None:
        """The same, and leaves what went wrong to the next `wait`, or to the end of the process."""
        self._writer.join()

    @property
    def writes(self) -> bool:
        """Whether this process does, for all that train together."""
        return current().is_first

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer.is_busy

    def path(self, number: int) -> Path:
        return self.directory / f"{self.name}_{number}"

    @property
    def numbers(self) -> list[int]:
        """Those of the checkpoints that were written whole, the newest last; something of them may be gone by now."""
        return sorted(number for name, number, _ in found_in(self.directory, self.name) if name == self.name)

    def next_number(self) -> int:
        return current().of_first(f"the next number of {self.name}", self._next_number)

    def newest(self) -> Loaded | None:
        """The newest good checkpoint, None where there is none at all."""
        found: list[Loaded] = []

        def find() -> str | None:
            found.extend(filter(None, [self._newest()]))
            return str(found[0].path) if found else None

        path = current().of_first(f"the newest checkpoint of {self.name}", find)
        loaded = None if path is None else found[0] if found else load_as_first(Path(path))
        current().meet(f"that it has read the newest checkpoint of {self.name}")  # before it may be dropped
        return loaded

    def delete(self) -> None:
        """All of them, and the directory where nothing else is in it."""
        self.wait()
        if not self.writes:
            return
        for number in self.numbers:
            self._remove(number)
        if self.directory.exists() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _write(self, number: int, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> None:
        filled = {name: array for name, array in arrays.items() if array.size}
        try:
            self._check_writable(number)
            with alone():
                ocp.save(
                    str(self.path(number)),
                    filled or {NOTHING: np.zeros(1)},  # Orbax takes no empty arrays, and no empty checkpoints
                    checkpointable_name=ARRAYS,
                    custom_metadata=record,
                )
        except Exception as error:
            raise OSError(
                f"The checkpoint {self.path(number)} was not written: {first_line(error)}. Those before it are as they were: "
                f"{', '.join(str(self.path(n)) for n in self.numbers) or 'there is none'}."
            ) from error
        self._known[number] = True
        try:
            self._drop_others()
        except OSError as error:
            warnings.warn(
                f"The checkpoint {self.path(number)} was written, and older ones that need not be kept could not be removed: "
                f"{first_line(error)}. The next save tries again.",
                stacklevel=2,
            )

    def _check_writable(self, number: int) -> None:
        """Raises what keeps Orbax from making its folder, for which some of its threads would wait for minutes."""
        for leftover in self._names(rf"{re.escape(self.name)}_\d+{re.escape(TEMPORARY)}"):  # of interrupted writes
            shutil.rmtree(self.directory / leftover[0])
        folder = temporary(self.path(number))
        folder.mkdir(parents=True)
        folder.rmdir()

    def _drop_others(self) -> None:
        """Those that need not be kept; the newest one stays, whatever a policy says, since it is gone on from. What is damaged does not
        count, and stays where it is."""
        if self.keep is None:
            return
        policy: Any = policies.LatestN(self.keep) if isinstance(self.keep, int) else self.keep
        there = [number for number in self.numbers if (self.path(number) / METADATA).exists()]
        good = [Counted(number, self._written(number)) for number in there if self._is_good(number)]
        stay = policy.should_preserve(good, context=policies.PreservationContext())
        for one, stays in zip(good[:-1], stay, strict=False):
            if not stays:
                self._remove(one.step)

    def _remove(self, number: int) -> None:
        path = self.path(number)  # renamed, so that no part of it is taken for a damaged one if this is interrupted
        shutil.rmtree(path.rename(temporary(path)))

    def _written(self, number: int) -> datetime.datetime:
        return datetime.datetime.fromtimestamp((self.path(number) / METADATA).stat().st_mtime, tz=datetime.UTC)

    def _is_good(self, number: int) -> bool:
        """Asked before others are dropped, of which enough must be left. What this process has not written is read once."""
        if number not in self._known:
            try:
                load(self.path(number))
                self._known[number] = True
            except DamagedError:
                self._known[number] = False
        return self._known[number]

    def _next_number(self) -> int:
        wait_for_all()
        taken = [int(match[1]) for match in self._names(rf"{re.escape(self.name)}_(\d+)(\..*)?")]
        return max(taken, default=0) + 1

    def _newest(self) -> Loaded | None:
        paths = {self.path(number): number for number in reversed(self.numbers)}
        loaded = newest_of(list(paths))
        if loaded is not None:
            self._known |= {number: path == loaded.path for path, number in paths.items() if number >= paths[loaded.path]}
        return loaded

    def _names(self, pattern: str) -> Iterator[re.Match[str]]:
        if self.directory.is_dir():
            yield from filter(None, (re.fullmatch(pattern, entry.name) for entry in self.directory.iterdir()))


def temporary(path: Path) -> Path:
    """As which Orbax writes a checkpoint, and clears away what is left of it."""
    return path.with_name(f"{path.name}{TEMPORARY}")


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
            warnings.warn(f"{' '.join(damaged)} It was left in place; {path} is used, the newest good one.", stacklevel=3)
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
        with progress().busy("reading a checkpoint"), quiet(), alone():
            return checked(path)
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"The checkpoint {path} is damaged: {first_line(error)}.") from error


def checked(path: Path) -> Loaded:
    record: Any = ocp.checkpointables_metadata(str(path)).custom_metadata
    if not isinstance(record, dict) or record.get("seal") != seal(record):
        raise DamagedError(f"The checkpoint {path} is damaged: its record is not what was written.")
    if record["format"] != FORMAT:
        raise DamagedError(
            f"The checkpoint {path} cannot be read: it has format {record['format']}, and this version of Unisono reads {FORMAT} alone."
        )
    described_there = record["arrays"]
    like = {name: np.empty(shape, dtype_named(dtype)) for name, (shape, dtype, _) in described_there.items()}
    filled = {name: array for name, array in like.items() if array.size}
    read = ocp.load(str(path), filled, checkpointable_name=ARRAYS) if filled else {}
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


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, with its digest."""
    record = json.loads(json.dumps(record))
    return record | {"seal": seal(record)}


def seal(record: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in record.items() if key != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else 'no text'}"
