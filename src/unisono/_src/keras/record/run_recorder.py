"""The recorder of this process. It writes the digests of training steps, if a record is asked for."""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from unisono._src.engine.global_batch import NO_POSITION, GlobalBatch
from unisono._src.engine.step.step_digests import StepDigests
from unisono._src.keras.checkpoint import background
from unisono._src.keras.record import record_file
from unisono._src.local_paths import as_local_path
from unisono._src.processes.agreement import get_agreement
from unisono._src.typed_jax import is_ready
from unisono._src.typing import Array, Json

SWITCH = "UNISONO_RECORD"
"""The environment variable that names the directory of a record."""

INSTEAD = "UNISONO_RECORD_INSTEAD"
"""The environment variable for a record's directory that overrides the script's own. Tools run scripts that have records, into which they
must not write."""

EACH_PROCESS = "UNISONO_RECORD_EACH_PROCESS"
"""The environment variable by which every process writes a record of its own, into the directory "process-N" below the run's."""

STEPS = "UNISONO_STEPS"
"""The environment variable for the number of recorded steps after which the process ends, with exit code 0."""

MOST_WAITING = 8
"""Calls whose digests may still be on the way. Waiting for an older one costs a training nothing."""

SECONDS = 0.5
"""Digests that have arrived are written after this time at the latest."""


class WaitingSteps(NamedTuple):
    """Steps whose digests the devices still compute. Batches are not kept: they may be large."""

    program: int
    first: int
    positions: np.ndarray
    rows: np.ndarray
    row_digests: np.ndarray
    digests: StepDigests
    entry: Array | None
    """The digests of the entry of the first step, if no step has made it."""

    @classmethod
    def of_batches(
        cls, program: int, first: int, batches: Sequence[GlobalBatch], digests: StepDigests, entry: Array | None
    ) -> WaitingSteps:
        return cls(
            program,
            first,
            np.array([batch.position or NO_POSITION for batch in batches], np.int64),
            np.array([batch.counted_rows for batch in batches], np.int64),
            np.array([[leaf.digest_rows() for leaf in batch.leaves] for batch in batches], np.uint32),
            digests,
            entry,
        )

    def wait(self) -> record_file.Steps:
        """Wait for the digests, and give the steps with them."""
        count = len(self.rows)
        losses = np.asarray(self.digests.losses)[:count]
        digests = np.asarray(self.digests.digests)[:count]
        return record_file.Steps(self.program, self.first, self.positions, self.rows, losses, self.row_digests, digests)


class RunRecorder:
    """Writes the steps of all programs of a process into one directory.

    Without a directory nothing is written. Steps are also written by the thread that writes a checkpoint, before it: else a run that is
    killed in between would resume behind steps that its record lacks.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, is_fixed: bool = False) -> None:
        """`is_fixed`: the directory takes the place of any other one."""
        self._directory = None if directory is None else as_local_path("UNISONO_RECORD", directory)
        self._is_fixed = is_fixed
        self._file: BinaryIO | None = None
        self._programs: dict[Hashable, int] = {}
        self._waiting: collections.deque[WaitingSteps] = collections.deque()
        self._written_at = 0.0
        self._writes = threading.RLock()
        """Held by the thread that writes frames."""

    @property
    def directory(self) -> Path | None:
        """The directory of the record; None if nothing is recorded."""
        return self._directory

    @property
    def file(self) -> BinaryIO | None:
        """The open file. The numbers of programs hold for it alone."""
        return self._file

    @contextlib.contextmanager
    def record_into(self, directory: str | os.PathLike[str]) -> Iterator[None]:
        """Record the steps of the block into a directory."""
        before = self._directory
        self._change_directory(Path(directory))
        try:
            yield
        finally:
            self._change_directory(before)

    def record_from_here(self, directory: str | os.PathLike[str]) -> None:
        """Record the steps of this process from here on.

        A record that goes on must keep its directory; another one is refused.
        """
        path = as_local_path("function(record=)", directory)
        if not self._is_fixed and self._directory not in (None, path):
            raise ValueError(
                f"record={os.fspath(directory)!r}, and this process records into {os.fspath(self._directory)!r} already. Name one directory for "
                f"all steps of a run."
            )
        self._change_directory(path)

    def stop(self) -> None:
        """Record no more steps."""
        self._change_directory(None)

    def _change_directory(self, directory: Path | None) -> None:
        if directory != self._directory and not self._is_fixed:
            self.close()
            self._directory = directory

    def note_program(self, key: Hashable, first: int, description: Json) -> int:
        """Number a program in the file. A program that comes for the first time is described there, and so is the run."""
        if self._file is None:
            self._begin(first)
        if key not in self._programs:
            self._programs[key] = len(self._programs)
            with self._writes:
                assert self._file is not None
                record_file.write_json(self._file, record_file.PROGRAM, description)
        return self._programs[key]

    def note_steps(self, steps: WaitingSteps) -> None:
        """Note steps, to be written when their digests have arrived."""
        self._waiting.append(steps)
        is_overdue = len(self._waiting) > MOST_WAITING
        # A thread that writes waits for digests, which may last as long as steps do.
        if (is_overdue or time.monotonic() - self._written_at > SECONDS) and self._writes.acquire(blocking=is_overdue):
            try:
                self._write_arrived()
            finally:
                self._writes.release()

    def write_details(self, details: Sequence[Json]) -> None:
        """Write details of the steps that were noted."""
        with self._writes:
            assert self._file is not None
            for detail in details:
                record_file.write_json(self._file, record_file.DETAIL, detail)

    def close(self) -> None:
        """Write what is left, and close the file."""
        with self._writes:
            if self._file is not None:
                self._write_noted()
                self._file.close()
                atexit.unregister(self.close)
                background.written_first.remove(self._write_noted)
            self._file = None
            self._programs = {}

    def _begin(self, first: int) -> None:
        assert self._directory is not None
        directory = self._directory / f"process-{get_agreement().number}" if records_each_process() else self._directory
        self._file = record_file.open_to_append(directory)
        self._written_at = time.monotonic()
        begin = {"format": record_file.FORMAT, "first": first, "command": sys.argv, "time": time.time()}
        record_file.write_json(self._file, record_file.BEGIN, begin)
        atexit.register(self.close)
        background.written_first.append(self._write_noted)

    def _write_noted(self) -> None:
        """Write all steps that were noted so far. It waits for their digests."""
        with self._writes:
            for _ in range(len(self._waiting)):
                self._write_oldest()

    def _write_arrived(self) -> None:
        """Write the digests that have arrived. It waits for those that are overdue."""
        while self._waiting and (len(self._waiting) > MOST_WAITING or is_ready(self._waiting[0].digests.digests)):
            self._write_oldest()
        self._written_at = time.monotonic()

    def _write_oldest(self) -> None:
        assert self._file is not None
        steps = self._waiting.popleft()
        if steps.entry is not None:
            record_file.write_entry(self._file, steps.program, steps.first, np.asarray(steps.entry))
        record_file.write_steps(self._file, steps.wait())


_recorder = RunRecorder(os.environ.get(INSTEAD) or os.environ.get(SWITCH) or None, is_fixed=bool(os.environ.get(INSTEAD)))


def get_recorder() -> RunRecorder:
    """Get the recorder of this process."""
    return _recorder


def is_recording() -> bool:
    """Whether steps are recorded. They are in all processes, or in none: their programs must be the same."""
    return _recorder.directory is not None


def writes_record() -> bool:
    """Whether this process writes a record. The first one does, for all processes, or each its own."""
    return get_agreement().is_first or records_each_process()


def records_each_process() -> bool:
    return bool(os.environ.get(EACH_PROCESS))


def end_after_last_step(steps: int) -> None:
    """End the process if it has taken the asked steps. The exit code is 0."""
    if steps >= read_asked_steps():
        raise SystemExit(0)


def read_asked_steps() -> int:
    """Read after how many steps the process shall end. The environment sets the number."""
    text = os.environ.get(STEPS, "")
    if not text:
        return sys.maxsize
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"the environment variable {STEPS} is a whole number of 1 or more; received {text!r}.")
    return int(text)
