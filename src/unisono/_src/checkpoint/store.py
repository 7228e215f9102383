"""Numbered checkpoints in a directory: each has arrays and a record, is written by Orbax, and checked when it is read (`reading`).

Orbax writes into a folder of another name and renames it at the end, so that a checkpoint is there as a whole or not at all.
Later changes show in the digests: of each array, and of the record that holds them.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from unisono._src.checkpoint.folders import METADATA, find_checkpoints
from unisono._src.checkpoint.reading import (
    DamagedError,
    LoadedCheckpoint,
    Record,
    load_checkpoint,
    load_chosen_by_first,
    load_newest,
    make_record,
    summarize_error,
)
from unisono._src.checkpoint.writer import BackgroundWriter, wait_for_writers
from unisono._src.processes.agreement import get_agreement
from unisono._src.typing import Json, Logs

NOTHING = "nothing"
"""The name of an array that stands for no array: Orbax writes no empty checkpoints."""

TEMPORARY = ".orbax-checkpoint-tmp"
"""The end of the name of the folder into which Orbax writes."""


class PreservationPolicy(Protocol):
    """A policy of `orbax.checkpoint.experimental.v1.training.preservation_policies`."""

    @property
    def should_preserve(self) -> Callable[..., Sequence[bool]]: ...


Keep: TypeAlias = int | PreservationPolicy
"""How many of the newest checkpoints are kept; or a policy."""


class CheckpointInfo(NamedTuple):
    """A checkpoint, as policies see it."""

    step: int
    time: datetime.datetime
    metrics: Logs | None = None


class CheckpointStore:
    """The checkpoints of one directory that have one name, as in `name_1`, `name_2`."""

    def __init__(self, directory: str | os.PathLike[str], name: str = "ckpt", keep: Keep | None = None) -> None:
        from unisono._src.checkpoint import orbax_private  # noqa: F401  # here, and not in the middle of a training

        self.directory = Path(directory).absolute()
        self.name = name
        self.keep = keep
        self._writer = BackgroundWriter()
        self._known: dict[int, bool] = {}
        """Whether each checkpoint is good that this process has written or read, by number."""

    def save(
        self,
        number: int,
        arrays: Callable[[], Mapping[str, np.ndarray]],
        record: Callable[[Mapping[str, np.ndarray]], Mapping[str, Json]],
    ) -> Path:
        """Write a checkpoint in the background, and return its path; raise the error of the last one, if that failed.

        `arrays()` returns the arrays on the host, `record(arrays)` their description; both are called in the background.
        """
        path = self.path(number)
        if not self.writes:
            return path

        def write() -> None:
            on_host = dict(arrays())
            self._write(number, on_host, make_record(on_host, record(on_host)))

        self._writer.start(write)
        return path

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; raise the error if it was not written."""
        self._writer.wait()

    def join(self) -> None:
        """Wait in the same way, and leave an error to the next `wait`, or to the end of the process."""
        self._writer.join()

    @property
    def writes(self) -> bool:
        """Return whether this process writes, for all processes of the training."""
        return get_agreement().is_first

    @property
    def is_busy(self) -> bool:
        """Return whether a checkpoint is being written."""
        return self._writer.is_busy

    def path(self, number: int) -> Path:
        return self.directory / f"{self.name}_{number}"

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints that were written whole, the newest last; parts of them may be gone by now."""
        return sorted(number for name, number, _ in find_checkpoints(self.directory, self.name) if name == self.name)

    def choose_next_number(self) -> int:
        return get_agreement().of_first(f"the next number of {self.name}", self._next_number)

    def load_newest(self) -> LoadedCheckpoint | None:
        """Return the newest good checkpoint; None where there is no checkpoint at all."""
        own: list[LoadedCheckpoint] = []

        def find() -> str | None:
            own.extend(filter(None, [self._newest()]))
            return str(own[0].path) if own else None

        path = get_agreement().of_first(f"the newest checkpoint of {self.name}", find)
        loaded = None if path is None else own[0] if own else load_chosen_by_first(Path(path))
        get_agreement().wait_for_processes(
            f"that it has read the newest checkpoint of {self.name}"
        )  # before process 0 may remove it
        return loaded

    def delete(self) -> None:
        """Delete all checkpoints, and the directory if nothing else is in it."""
        self.wait()
        if not self.writes:
            return
        for number in self.numbers:
            self._remove(number)
        if self.directory.exists() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _write(self, number: int, arrays: dict[str, np.ndarray], record: Record) -> None:
        from unisono._src.checkpoint import orbax_private

        filled = {name: array for name, array in arrays.items() if array.size}
        try:
            self._check_writable(number)
            # Orbax takes neither empty arrays nor empty checkpoints.
            orbax_private.save_arrays(str(self.path(number)), filled or {NOTHING: np.zeros(1)}, record)
        except Exception as error:
            raise OSError(
                f"The checkpoint {self.path(number)} was not written: {summarize_error(error)}. Those before it are as they were: "
                f"{', '.join(str(self.path(other)) for other in self.numbers) or 'there is none'}."
            ) from error
        self._known[number] = True
        try:
            self._drop_others()
        except OSError as error:
            warnings.warn(
                f"The checkpoint {self.path(number)} was written, and older ones that need not be kept could not be removed: "
                f"{summarize_error(error)}. The next save tries again.",
                stacklevel=2,
            )

    def _check_writable(self, number: int) -> None:
        """Raise here if the folder cannot be made: threads of Orbax would wait for it for minutes."""
        # Interrupted writes have left these folders.
        for leftover in self._match_names(rf"{re.escape(self.name)}_\d+{re.escape(TEMPORARY)}"):
            shutil.rmtree(self.directory / leftover[0])
        folder = make_temporary_path(self.path(number))
        folder.mkdir(parents=True)
        folder.rmdir()

    def _drop_others(self) -> None:
        """Remove the checkpoints that need not be kept. The newest always stays, since a training goes on from it. Damaged checkpoints do
        not count, and stay in place."""
        if self.keep is None:
            return
        from unisono._src.checkpoint import orbax_private

        written = [number for number in self.numbers if (self.path(number) / METADATA).exists()]
        good = [CheckpointInfo(number, self._read_write_time(number)) for number in written if self._is_good(number)]
        for checkpoint, stays in zip(good[:-1], orbax_private.choose_kept(self.keep, good), strict=False):
            if not stays:
                self._remove(checkpoint.step)

    def _remove(self, number: int) -> None:
        path = self.path(number)  # renamed, so that an interruption leaves no part that looks like a damaged checkpoint
        shutil.rmtree(path.rename(make_temporary_path(path)))

    def _read_write_time(self, number: int) -> datetime.datetime:
        return datetime.datetime.fromtimestamp((self.path(number) / METADATA).stat().st_mtime, tz=datetime.UTC)

    def _is_good(self, number: int) -> bool:
        """Return whether a checkpoint is good, before others are removed. A checkpoint that this process has not written is read once."""
        if number not in self._known:
            try:
                load_checkpoint(self.path(number))
                self._known[number] = True
            except DamagedError:
                self._known[number] = False
        return self._known[number]

    def _next_number(self) -> int:
        wait_for_writers()
        taken = [int(match[1]) for match in self._match_names(rf"{re.escape(self.name)}_(\d+)(\..*)?")]
        return max(taken, default=0) + 1

    def _newest(self) -> LoadedCheckpoint | None:
        paths = {self.path(number): number for number in reversed(self.numbers)}
        loaded = load_newest(list(paths))
        if loaded is not None:
            self._known |= {number: path == loaded.path for path, number in paths.items() if number >= paths[loaded.path]}
        return loaded

    def _match_names(self, pattern: str) -> Iterator[re.Match[str]]:
        if self.directory.is_dir():
            yield from filter(None, (re.fullmatch(pattern, entry.name) for entry in self.directory.iterdir()))


def make_temporary_path(path: Path) -> Path:
    """Return the path at which Orbax writes a checkpoint, and removes what an interrupted write has left."""
    return path.with_name(f"{path.name}{TEMPORARY}")
