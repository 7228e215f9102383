"""The recorder of one step program: counts its steps, and describes it in the record."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import BinaryIO

import jax

from unisono._src.checkpoint.run_description import describe_run
from unisono._src.data.global_batch import GlobalBatch
from unisono._src.ownership import OwningStrategy
from unisono._src.record.run_details import get_details
from unisono._src.record.run_recorder import WaitingSteps, end_after_last_step, get_recorder, is_recording, writes_record
from unisono._src.replica.protocol import RecordedVariables, State
from unisono._src.step.step_digests import StepDigests
from unisono._src.step_count import get_step_count
from unisono._src.typing import Array, Json


class ProgramRecorder:
    """Counts the steps of a program that trains, and hands their digests to the recorder of the process, if there is a record."""

    def __init__(self, name: str, strategy: OwningStrategy, list_recorded: Callable[[], RecordedVariables]) -> None:
        self._name = name
        self._strategy = strategy
        self.list_recorded = list_recorded
        """Returns the variables that the digests are of."""
        self._numbers: dict[tuple[BinaryIO | None, int], int] = {}
        """Numbers of the program in the record, by the file and the arrays of a batch."""
        self._entry: Array | None = None
        """The digests of the state from which the next step starts, where no step has made this state."""
        self._has_warned = False
        self._details = get_details()

    @property
    def is_on(self) -> bool:
        """Return whether there is a record."""
        return is_recording()

    @property
    def replicas(self) -> int:
        return self._strategy.num_replicas_in_sync

    def note_entry(self, digests: Array, state: State) -> None:
        self._entry = digests
        if self._details is not None:
            self._details.note_state(self.list_recorded(), state)

    def note_steps(self, batches: Sequence[GlobalBatch], digests: Sequence[StepDigests]) -> None:
        first = get_step_count().add(len(batches))
        if not self.is_on:
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
        """Return the number of the program in the record, which may begin with step `first`."""
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
