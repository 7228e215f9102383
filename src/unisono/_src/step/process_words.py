"""The words that the processes send along with the sums of a step: what each has read, and whether it wishes to stop."""

from __future__ import annotations

import numpy as np

from unisono._src.data.global_batch import GlobalBatch, Position
from unisono._src.processes.agreement import get_agreement


class StepWords:
    """The words of a process about a batch: (pass, batch, digest of the rows, wish to stop).

    They cost no message of their own, and arrive at the same step in all processes.
    """

    def __init__(self, batch: GlobalBatch) -> None:
        self._batch = batch

    def collect(self) -> tuple[int, ...]:
        """Return the words of this process."""
        pass_, number = self._batch.position or NO_POSITION
        return pass_, number, self._batch.digest, get_agreement().wishes_to_stop

    def receive(self, words: np.ndarray) -> None:
        """Take the words of all processes, in rows; refuse processes that have read different rows."""
        get_agreement().has_heard_stop_wish = bool(words[:, -1].any())
        check_same_rows(words[:, :-1])


NO_POSITION: Position = (-1, -1)
"""The position of a batch that has none."""


def check_same_rows(words: np.ndarray) -> None:
    """Refuse processes that have read different rows; `words` has a row for each process."""
    positions: list[Position] = [(pass_, number) for pass_, number in words[:, :2].tolist()]
    digests = words[:, 2].tolist()
    other = next((process for process, of_process in enumerate(words.tolist()) if of_process != words[0].tolist()), None)
    if other is None:
        return
    if positions[other] != positions[0]:
        raise ValueError(
            f"Process 0 is at {describe_position(positions[0])}, and process {other} at {describe_position(positions[other])}: their data "
            f"have other lengths. {WHOLE_DATA}"
        )
    raise ValueError(
        f"{describe_position(positions[0]).capitalize()} has other rows in process {other} than in process 0 (digests {digests[other]:08x} "
        f"and {digests[0]:08x}). {WHOLE_DATA}"
    )


WHOLE_DATA = (
    "Every process reads the whole data and keeps its part, so all must read the same, in the same order: seed every shuffle, and do not "
    "shard by process."
)


def describe_position(position: Position) -> str:
    return "a batch" if position == NO_POSITION else f"batch {position[1]} of pass {position[0]}"
