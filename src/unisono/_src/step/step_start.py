"""The start of a step: the state from which it starts, of which the recorder and the other processes are told where no step has made it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from unisono._src.placement import Placement
from unisono._src.processes import names
from unisono._src.replica.protocol import State
from unisono._src.step.constant_digests import ConstantDigests
from unisono._src.step.device_state import DeviceState
from unisono._src.step.digest_stage import digest_state
from unisono._src.step.process_words import NOTHING_COMPARED, StartDigests, digest_values
from unisono._src.step.recorder import StepRecorder
from unisono._src.typing import AnyArray, Array
from unisono._src.xla.programs import DeviceProgram
from unisono._src.xla.rewrite import rewrite_function


class StepStart:
    """The start of the next step of one program."""

    def __init__(
        self, placement: Placement, device_state: DeviceState, recorder: StepRecorder | None, fixed_digest: int = 0
    ) -> None:
        """`recorder` is None where the program does not train: what it starts from is then not compared. `fixed_digest` is of numbers in the
        program, which are compared always."""
        self._fixed_digest = fixed_digest
        self._lead = placement.lead
        self._has_other_processes = placement.processes is not None
        self._device_state = device_state
        self._recorder = recorder
        self._constant_digests = ConstantDigests(placement.lead)
        self._may_programs_differ = bool(os.environ.get(names.OTHER_PROGRAMS))
        self._digest_program = DeviceProgram(rewrite_function(digest_state, placement.lead.platform))
        self.digests = NOTHING_COMPARED
        """What the processes compare in the next step."""

    def receive_constants(self, constants: Sequence[AnyArray]) -> None:
        """Take the values that are the same for all replicas."""
        if self._has_other_processes:
            self.digests = StartDigests(constants=self._constant_digests.digest(constants) ^ self._fixed_digest)

    def receive_program(self, digest: int) -> None:
        """Take the digest of the program that finishes the step."""
        if not self._may_programs_differ:
            self.digests = self.digests._replace(program=digest)

    def receive_state(self, state: State) -> None:
        """Bring the state to the lead."""
        is_compared = self._has_other_processes and self._recorder is not None
        assigned = self._device_state.list_assigned(state) if is_compared else []
        is_other = self._device_state.receive_state(state)
        if assigned is None:
            assigned = [(0, self._digest_state())]
        self.digests = self.digests._replace(assigned=digest_values(assigned))
        if is_other and self._recorder is not None and self._recorder.is_on:
            self._recorder.note_entry(self._digest_state(), self._device_state.lead_state)

    def note_finished(self) -> None:
        """Note that the step is finished. The next one may be of the same call here, and of another call in another process."""
        self.digests = self.digests._replace(assigned=NOTHING_COMPARED.assigned)

    def _digest_state(self) -> Array:
        """Return the digests of the state on the lead."""
        return self._digest_program(self._lead, None, self._device_state.lead_state)
