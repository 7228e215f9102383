"""Numbered checkpoints in a directory: each has arrays and a record, is written by Orbax, and checked when it is read (`reading`).

Orbax writes into a folder of another name and renames it at the end, so that a checkpoint is there as a whole or not at all.
Later changes show in the digests: of each array, and of the record that holds them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from unisono._src.checkpoint.disk_space import FullDiskError, describe_lack_of_room
from unisono._src.checkpoint.reading import (
    METADATA,
    DamagedError,
    LoadedCheckpoint,
    find_checkpoints,
    load_checkpoint,
    make_record,
    read_first_good,
    silence_orbax,
    summarize_error,
)
from unisono._src.checkpoint.replay_start import select_starts
from unisono._src.checkpoint.writer import BackgroundWriter, wait_for_writers
from unisono._src.checkpoint.written_first import write_first
from unisono._src.processes.agreement import get_agreement
from unisono._src.processes.replayed_step import get_replayed_step
from unisono._src.typing import Json, Logs

if TYPE_CHECKING:
    from orbax.checkpoint.experimental.v1.training import preservation_policies

NOTHING = "nothing"
"""The name of an array that stands for no array: Orbax writes no empty checkpoints."""

TEMPORARY = ".orbax-checkpoint-tmp"
"""The end of the name of the folder into which Orbax writes."""


Keep: TypeAlias = "int | preservation_policies.PreservationPolicy"
"""How many of the newest checkpoints are kept; or a policy."""

MakeContent: TypeAlias = Callable[[], tuple[Mapping[str, np.ndarray], Mapping[str, Json]]]
"""Returns the arrays of a checkpoint, on the host, and their description. It is called in the background."""


class CheckpointInfo(NamedTuple):
    """A checkpoint, as policies see it."""

    step: int
    time: datetime.datetime
    metrics: Logs | None = None


class CheckpointStore(BackgroundWriter):
    """The checkpoints of one directory that have one name, as in `name_1`, `name_2`. They are written in the background."""

    def __init__(self, directory: str | os.PathLike[str], name: str = "ckpt", keep: Keep | None = None) -> None:
        from unisono._src.checkpoint import orbax_private  # noqa: F401  # here, and not in the middle of a training

        super().__init__()
        self.directory = Path(directory).absolute()
        self.name = name
        self.keep = keep
        self._known: dict[Path, bool] = {}
        """Whether each checkpoint is good that this process has written or read."""

    def save(self, number: int, make_content: MakeContent) -> Path:
        """Write a checkpoint in the background, and return its path; raise the error of the last one, if that failed, once this one is begun.

        A process that replays a step writes none: the checkpoints are those of the run.
        """
        if get_agreement().is_first and get_replayed_step() is None:
            self.start(lambda: self._write(number, make_content))
        return self.path(number)

    def settle(self, then: str) -> None:
        """Wait until nothing is written; warn of a checkpoint for which there was no room, and say what comes then. Raise other failures."""
        try:
            self.wait()
        except FullDiskError as error:
            warnings.warn(f"{error} {then}", stacklevel=4)

    def finish(self, path: Path) -> Path:
        """Wait until a checkpoint is written, and return it. Where there is no room for it, warn and return the one before it, if any."""
        try:
            self.wait()
        except FullDiskError as error:
            if not self.numbers:
                raise
            warnings.warn(f"{error} The last of these is what a training goes on from.", stacklevel=4)
            return self.path(self.numbers[-1])
        return path

    def path(self, number: int) -> Path:
        return self.directory / f"{self.name}_{number}"

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints that were written whole, the newest last; parts of them may be gone by now."""
        return sorted(number for _, number, _ in find_checkpoints(self.directory, self.name))

    def choose_next_number(self) -> int:
        def choose() -> int:
            wait_for_writers()
            return max((int(match[1]) for match in self._match_names(rf"{re.escape(self.name)}_(\d+)(\..*)?")), default=0) + 1

        return get_agreement().of_first(f"the next number of {self.name}", choose)

    def load_newest(self) -> LoadedCheckpoint | None:
        """Return the newest good checkpoint; None where there is no checkpoint at all. Damaged ones are left in place, and named in a
        warning."""
        loaded: LoadedCheckpoint | None = None

        def find() -> str | None:
            nonlocal loaded
            loaded, damaged = read_first_good(lambda: select_starts(map(self.path, reversed(self.numbers))), load_checkpoint)
            said = " ".join(damaged.values())
            if loaded is None:
                if damaged:
                    raise DamagedError(f"{said} No other checkpoint is there. Move {self.directory} away to begin anew.")
                return None
            if damaged:
                warnings.warn(f"{said} It was left in place; {loaded.path} is used, the newest good one.", stacklevel=4)
            self._known |= dict.fromkeys(damaged, False) | {loaded.path: True}
            return str(loaded.path)

        path = get_agreement().of_first(f"the newest checkpoint of {self.name}", find)
        if path is not None and loaded is None:
            loaded = load_chosen_by_first(Path(path))
        # Before process 0 may remove it.
        get_agreement().wait_for_processes(f"that it has read the newest checkpoint of {self.name}")
        return loaded

    def delete(self) -> None:
        """Delete all checkpoints, and the directory if nothing else is in it. A process that replays a step deletes none."""
        self.wait()
        if not get_agreement().is_first or get_replayed_step() is not None:
            return
        for number in self.numbers:
            self._remove(number)
        self._remove_leftovers()
        if self.directory.exists() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _write(self, number: int, make_content: MakeContent) -> None:
        from unisono._src.checkpoint import orbax_private

        arrays, description = make_content()
        record = make_record(arrays, description)
        filled = {name: array for name, array in arrays.items() if array.size}
        try:
            write_first()
            self._check_writable(number)
            # Orbax takes neither empty arrays nor empty checkpoints.
            with silence_orbax():
                orbax_private.save_arrays(str(self.path(number)), filled or {NOTHING: np.zeros(1)}, record)
        except Exception as error:
            with contextlib.suppress(OSError):  # else the next save tries it, and says so
                self._remove_leftovers()
            raise self._describe_failure(number, error, sum(array.nbytes for array in filled.values())) from error
        self._known[self.path(number)] = True
        try:
            self._drop_others()
        except OSError as error:
            warnings.warn(
                f"The checkpoint {self.path(number)} was written, and older ones that need not be kept could not be removed: "
                f"{summarize_error(error)}. The next save tries again.",
                stacklevel=2,
            )

    def _describe_failure(self, number: int, error: Exception, wanted: int) -> OSError:
        """Return the error for a checkpoint of so many bytes that was not written."""
        no_room = describe_lack_of_room(error, self.directory, wanted)
        text = (
            f"The checkpoint {self.path(number)} was not written: {no_room or summarize_error(error)}. Those before it are as they were: "
            f"{', '.join(str(self.path(other)) for other in self.numbers) or 'there is none'}."
        )
        return OSError(text) if no_room is None else FullDiskError(text)

    def _check_writable(self, number: int) -> None:
        """Raise here if the folder cannot be made: threads of Orbax would wait for it for minutes."""
        self._remove_leftovers()
        folder = make_temporary_path(self.path(number))
        folder.mkdir(parents=True)
        folder.rmdir()

    def _remove_leftovers(self) -> None:
        """Remove the folders that interrupted and failed writes have left."""
        for leftover in self._match_names(rf"{re.escape(self.name)}_\d+{re.escape(TEMPORARY)}"):
            shutil.rmtree(self.directory / leftover[0])

    def _drop_others(self) -> None:
        """Remove the checkpoints that need not be kept. The newest always stays, since a training goes on from it. Damaged checkpoints do
        not count, and stay in place."""
        if self.keep is None:
            return
        from unisono._src.checkpoint import orbax_private

        written = [number for number in self.numbers if (self.path(number) / METADATA).exists()]
        times = {number: (self.path(number) / METADATA).stat().st_mtime for number in written if self._is_good(number)}
        good = [CheckpointInfo(number, datetime.datetime.fromtimestamp(time, tz=datetime.UTC)) for number, time in times.items()]
        for checkpoint, stays in zip(good[:-1], orbax_private.choose_kept(self.keep, good), strict=False):
            if not stays:
                self._remove(checkpoint.step)

    def _remove(self, number: int) -> None:
        path = self.path(number)  # renamed, so that an interruption leaves no part that looks like a damaged checkpoint
        shutil.rmtree(path.rename(make_temporary_path(path)))
        self._known.pop(path, None)

    def _is_good(self, number: int) -> bool:
        """Return whether a checkpoint is good, before others are removed. A checkpoint that this process has not written is read once."""
        path = self.path(number)
        if path not in self._known:
            try:
                load_checkpoint(path)
                self._known[path] = True
            except DamagedError:
                self._known[path] = False
        return self._known[path]

    def _match_names(self, pattern: str) -> Iterator[re.Match[str]]:
        if self.directory.is_dir():
            yield from filter(None, (re.fullmatch(pattern, entry.name) for entry in self.directory.iterdir()))


def make_temporary_path(path: Path) -> Path:
    """Return the path at which Orbax writes a checkpoint, and removes what an interrupted write has left."""
    return path.with_name(f"{path.name}{TEMPORARY}")


def load_chosen_by_first(path: Path) -> LoadedCheckpoint:
    """Return, in another process, the checkpoint from which process 0 goes on."""
    if not path.exists():
        raise FileNotFoundError(
            f"Process 0 goes on from the checkpoint {path}, which process {get_agreement().number} does not find. Name a directory that all "
            f"processes share."
        )
    return load_checkpoint(path)
