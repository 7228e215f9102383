"""Numbered checkpoints in a directory: numbering, writing, and removal. A policy says which of them are kept."""

from __future__ import annotations

import datetime
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from unisono._src.keras.checkpoint import background, files
from unisono._src.keras.checkpoint.files import DamagedError, LoadedCheckpoint, load_checkpoint
from unisono._src.keras.checkpoint.latest import find_checkpoints, load_chosen_by_first, read_newest
from unisono._src.keras.checkpoint.storage import Place, StorageError, find_place, summarize_error
from unisono._src.processes.agreement import get_agreement
from unisono._src.processes.names import get_replayed_step
from unisono._src.typing import Json, Logs


class CheckpointInfo(NamedTuple):
    """A checkpoint, as policies see it."""

    step: int
    time: datetime.datetime
    metrics: Logs | None = None


class KeepPolicy(Protocol):
    """Says which checkpoints are kept, as the policies of Orbax do."""

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: None) -> Sequence[bool]: ...


Keep: TypeAlias = int | KeepPolicy
"""How many of the newest checkpoints are kept; or a policy."""

MakeContent: TypeAlias = Callable[[], tuple[Mapping[str, np.ndarray], Mapping[str, Json]]]
"""Makes the arrays of a checkpoint, on the host, and their description. It is called in the background."""


class CheckpointStore(background.BackgroundWriter):
    """The checkpoints of one directory and one name. They are `name_1`, `name_2` and so on, and are written in the background."""

    def __init__(self, directory: str | os.PathLike[str], name: str = "ckpt", keep: Keep | None = None) -> None:
        super().__init__()
        self.directory = find_place(directory)
        self.name = name
        self.keep = keep
        self._known: dict[Place, bool] = {}
        """Whether each checkpoint is good that this process has written or read."""

    def save(self, number: int, make_content: MakeContent) -> Place:
        """Write a checkpoint in the background, and give its path.

        If the last write failed, its error is raised once this one is begun. A process that replays a step writes none: the
        checkpoints are those of the run.
        """
        if get_agreement().is_first and get_replayed_step() is None:
            self.start(lambda: self._write(number, make_content))
        return self.path(number)

    def settle(self, then: str) -> None:
        """Wait until nothing is written, and warn of a full disk, or of a storage that failed.

        The warning ends with `then`, which says what comes next. Other failures are raised.
        """
        try:
            self.wait()
        except StorageError as error:
            warnings.warn(f"{error} {then}", stacklevel=4)

    def finish(self, path: Place) -> Place:
        """Wait until a checkpoint is written, and give its path.

        If the storage did not take it, warn and give the path of the one before it, if any.
        """
        try:
            self.wait()
        except StorageError as error:
            before = self._list_before()
            if not before:
                raise
            warnings.warn(f"{error} The last of these is what a training goes on from.", stacklevel=4)
            return before[-1]
        return path

    def path(self, number: int) -> Place:
        return self.directory / f"{self.name}_{number}"

    @property
    def numbers(self) -> list[int]:
        """The numbers of the checkpoints that were written whole. The newest is last. Files of them may be gone by now."""
        return [number for _, number, _ in find_checkpoints(self.directory, self.name)]

    def choose_next_number(self) -> int:
        """Choose the number after all that are there. Unfinished checkpoints count."""

        def choose() -> int:
            background.wait_for_writers()
            try:
                begun = self._list_begun()
            except StorageError:  # the write that follows says so, and never writes over another
                begun = [int(path.name.rpartition("_")[2]) for path in self._known]
            return max(begun, default=0) + 1

        return get_agreement().of_first(f"the next number of {self.name}", choose)

    def load_newest(self) -> LoadedCheckpoint | None:
        """Load the newest good checkpoint. It is None if there is no checkpoint at all."""
        loaded: LoadedCheckpoint | None = None

        def find() -> str | None:
            nonlocal loaded
            loaded = read_newest(self.directory, lambda: map(self.path, reversed(self.numbers)), load_checkpoint)
            return None if loaded is None else str(loaded.path)

        path = get_agreement().of_first(f"the newest checkpoint of {self.name}", find)
        if path is not None:
            loaded = loaded or load_chosen_by_first(find_place(path))
            self._known[loaded.path] = True
        # Before process 0 may remove it.
        get_agreement().wait_for_processes(f"that it has read the newest checkpoint of {self.name}")
        return loaded

    def delete(self) -> None:
        """Delete all checkpoints, and the directory if nothing else is in it. A process that replays a step deletes none."""
        self.wait()
        if not get_agreement().is_first or get_replayed_step() is not None:
            return
        try:
            for number in self.numbers:
                self._remove(number)
            self._remove_unfinished()
            self.directory.remove_if_empty()
        except StorageError as error:
            warnings.warn(
                f"The checkpoints in {self.directory} could not be deleted: {error}. Delete them, or the same program goes on from the last one.",
                stacklevel=2,
            )

    def _write(self, number: int, make_content: MakeContent) -> None:
        path = self.path(number)
        arrays, description = make_content()
        try:
            for write in list(background.written_first):
                write()
            self._remove_unfinished()
            files.write_checkpoint(path, arrays, description)
        except Exception as error:
            raise self._describe_failure(path, error, sum(array.nbytes for array in arrays.values())) from error
        self._known[path] = True
        try:
            self._drop_others()
        except OSError as error:
            warnings.warn(
                f"The checkpoint {path} was written, and older ones that need not be kept could not be removed: "
                f"{summarize_error(error)}. The next save tries again.",
                stacklevel=2,
            )

    def _describe_failure(self, path: Place, error: Exception, wanted: int) -> OSError:
        """Build the error for a checkpoint that was not written. It would have had `wanted` bytes."""
        no_room = self.directory.describe_failure(error, wanted)
        text = (
            f"The checkpoint {path} was not written: {no_room or summarize_error(error)}. Those before it are as they were: "
            f"{', '.join(map(str, self._list_before())) or 'there is none'}."
        )
        return OSError(text) if no_room is None else StorageError(text)

    def _list_before(self) -> list[Place]:
        """List the checkpoints that are there: where the storage does not answer, those that this process knows."""
        try:
            return [self.path(number) for number in self.numbers]
        except StorageError:
            return [path for path, is_good in self._known.items() if is_good]

    def _drop_others(self) -> None:
        """Remove the checkpoints that need not be kept. The newest always stays, since a training goes on from it. Damaged checkpoints do
        not count, and stay in place."""
        if self.keep is None:
            return
        good = [number for number in self.numbers if self._is_good(number)]
        if isinstance(self.keep, int):
            stays = [len(good) - place <= self.keep for place in range(len(good))]
        else:
            times = [
                datetime.datetime.fromtimestamp(files.read_write_time(self.path(number)) / 1e9, datetime.UTC) for number in good
            ]
            stays = self.keep.should_preserve(list(map(CheckpointInfo, good, times)), context=None)
        for number, stay in zip(good[:-1], stays, strict=False):
            if not stay:
                self._remove(number)

    def _remove(self, number: int) -> None:
        self._known.pop(self.path(number), None)
        self.path(number).remove_folder()

    def _is_good(self, number: int) -> bool:
        """Whether a checkpoint is known to be good.

        It is asked before others are removed. A checkpoint that this process has not written is read once.
        """
        path = self.path(number)
        if path not in self._known:
            try:
                self._known[path] = bool(load_checkpoint(path))
            except (DamagedError, ImportError):
                self._known[path] = False
        return self._known[path]

    def _remove_unfinished(self) -> None:
        """Remove what interrupted writes have left."""
        for number in self._list_begun():
            if self.path(number) not in self._known:  # each is a question to the storage
                self.path(number).remove_unfinished()

    def _list_begun(self) -> list[int]:
        """List the numbers of all checkpoints, finished or not."""
        matches = (re.fullmatch(rf"{re.escape(self.name)}_(\d+)(\..*)?", entry) for entry in self.directory.list_names())
        return [int(match[1]) for match in matches if match]
