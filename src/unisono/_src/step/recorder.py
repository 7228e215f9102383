"""The recorder of a step: it is told of the steps that train, of their batches and their digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.replica.protocol import State
from unisono._src.step.step_digests import StepDigests
from unisono._src.typing import Array


class StepRecorder(Protocol):
    """The recorder of one step program."""

    @property
    def is_on(self) -> bool:
        """Return whether digests are wanted: programs are compiled for it."""
        ...

    def note_entry(self, digests: Array, state: State) -> None:
        """Note the digests of the state, on the lead, from which the next step starts, where no step has made this state."""
        ...

    def note_steps(self, batches: Sequence[GlobalBatch], digests: Sequence[StepDigests]) -> None:
        """Note steps that were started, one for each batch; `digests` has one item where digests are wanted."""
        ...
