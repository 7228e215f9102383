"""The recorder of one step program. It counts the program's steps, and describes the program in the record."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import BinaryIO

import jax

from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.state import RecordedVariables, get_step_count
from unisono._src.engine.step.observer import StartState, StepObserver
from unisono._src.engine.step.step_digests import StepDigests
from unisono._src.keras.checkpoint.run_description import describe_run
from unisono._src.keras.ownership import OwningStrategy
from unisono._src.keras.record.run_details import get_details
from unisono._src.keras.record.run_recorder import (
    WaitingSteps,
    end_after_last_step,
    get_recorder,
    is_recording,
    read_asked_steps,
    writes_record,
)
from unisono._src.typing import Array, Json


class ProgramRecorder(StepObserver):
    """Counts a program's training steps, and hands on their digests.

    The recorder of the process gets the digests, if there is a record.
    """

    def __init__(self, name: str, strategy: OwningStrategy, list_recorded: Callable[[], RecordedVariables]) -> None:
        self._name = name
        self._strategy = strategy
        self.list_recorded = list_recorded
        """Lists the variables whose digests are recorded."""
        self._numbers: dict[tuple[BinaryIO | None, int], int] = {}
        """Numbers of the program in the record, by the file and the number of a batch's arrays."""
        self._entry: Array | None = None
        """The digests of the entry of the next step, if no step has made it."""
        self._has_warned = False
        self._details = get_details()

    @property
    def wants_digests(self) -> bool:
        """Whether there is a record."""
        return is_recording()

    @property
    def replicas(self) -> int:
        return self._strategy.num_replicas_in_sync

    def count_unwatched(self, step: int) -> int:
        """Count the next steps that one call may take: none beyond those that are asked for."""
        return max(1, read_asked_steps() - step) if self.wants_digests else super().count_unwatched(step)

    def take_state(self, state: StartState) -> None:
        if state.is_other and self.wants_digests:
            self._entry = state.digest()
            if self._details is not None:
                self._details.note_state(self.list_recorded(), state.read())

    def after_steps(self, batches: Sequence[GlobalBatch], digests: Sequence[StepDigests]) -> None:
        first = get_step_count().add(len(batches))
        if not self.wants_digests:
            return
        if writes_record():
            self._write_steps(first, batches, digests)
        end_after_last_step(first + len(batches))

    def _write_steps(self, first: int, batches: Sequence[GlobalBatch], digests: Sequence[StepDigests]) -> None:
        if not digests:
            self._warn_of_gap()
            return
        number = self._find_number(first, len(batches[0].leaves))
        get_recorder().note_steps(WaitingSteps.of_batches(number, first, batches, digests[0], self._entry))
        self._entry = None
        if self._details is not None:
            for step, batch in enumerate(batches, first):
                self._details.note_rows(step, batch, self.replicas)
            get_recorder().write_details(self._details.take_noted())

    def _warn_of_gap(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The steps of {self._name!r} are not compiled, and such steps are not recorded. Leave out run_eagerly=True and "
                f"jax.disable_jit() to record them.",
                stacklevel=2,
            )

    def _find_number(self, first: int, arrays: int) -> int:
        """Find the program's number in the record. The record may begin with step `first`."""
        recorder = get_recorder()
        number = self._numbers.get((recorder.file, arrays))
        if number is None:
            recorded = self.list_recorded()
            key = self._name, arrays, tuple(id(variable) for _, variables in recorded for variable in variables)
            number = recorder.note_program(key, first, self._describe(recorded, arrays))
            self._numbers[recorder.file, arrays] = number
        return number

    def _describe(self, recorded: RecordedVariables, arrays: int) -> Json:
        placement = self._strategy.placement
        return {
            "name": self._name,
            "variables": [(kind, variable.path, list(variable.shape)) for kind, variables in recorded for variable in variables],
            "arrays": arrays,
            "facts": describe_run(self._strategy, self.replicas),
            "placement": {
                "devices": len(placement.devices),
                "processes": len(placement.processes.leads) if placement.processes else 1,
                "strategy": type(self._strategy).__name__,
                "platform": placement.lead.platform,
                "available": len(jax.local_devices()),
            },
        }
