"""Numbered checkpoints in a directory: arrays and a record each, written by Orbax, and checked when they are read (`reading`).

Orbax writes into a folder of another name and renames it in the end, so that a checkpoint is there as a whole or not at all.
What happens to it afterwards shows in its digests: of each array, and of the record that holds them.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unisono._src.checkpoint.folders import METADATA, found_in
from unisono._src.checkpoint.reading import DamagedError, Loaded, first_line, load, load_as_first, newest_of, recorded
from unisono._src.checkpoint.writer import Writer, wait_for_all
from unisono._src.processes.agreement import current

NOTHING = "nothing"
"""The name of an array that stands for none: Orbax writes no empty checkpoints."""

TEMPORARY = ".orbax-checkpoint-tmp"
"""The end of the name under which Orbax writes."""

Keep = int | Any
"""So many newest checkpoints, or a policy of `orbax.checkpoint.experimental.v1.training.preservation_policies`."""


class Counted(NamedTuple):
    """A checkpoint, as policies see it."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None = None


class Store:
    """The checkpoints of one directory that have one name, as in `name_1`, `name_2`."""

    def __init__(self, directory: str | os.PathLike[str], name: str = "ckpt", keep: Keep = None) -> None:
        from unisono._src.checkpoint import orbax_private  # noqa: F401  # not in the middle of a training, where it is needed

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
            self._write(number, found, recorded(found, record(found)))

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
        from unisono._src.checkpoint import orbax_private

        filled = {name: array for name, array in arrays.items() if array.size}
        try:
            self._check_writable(number)
            orbax_private.write(
                str(self.path(number)), filled or {NOTHING: np.zeros(1)}, record
            )  # it takes nothing that is empty
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
        from unisono._src.checkpoint import orbax_private

        there = [number for number in self.numbers if (self.path(number) / METADATA).exists()]
        good = [Counted(number, self._written(number)) for number in there if self._is_good(number)]
        for one, stays in zip(good[:-1], orbax_private.stay(self.keep, good), strict=False):
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
