"""The schedule of the probes of batches, before they are trained on."""

from __future__ import annotations


class ProbeSchedule:
    """The batches that are probed: the first, the second, the fourth, the eighth, ...; and all batches as long as a question is open.

    After the first, a probe costs two forward passes over two replicas' rows, so that N batches cost about log2 N such probes.

    >>> schedule = ProbeSchedule()
    >>> due = []
    >>> for _ in range(9):
    ...     due.append(schedule.is_due(is_undecided=False))
    ...     schedule.note_trained(1)
    >>> due
    [True, True, False, True, False, False, False, True, False]
    """

    def __init__(self, are_repeated: bool = True) -> None:
        """`are_repeated`: whether there is more than one probe where no question is open."""
        self._trained = 0
        self._next = 0
        self._are_repeated = are_repeated

    def is_due(self, is_undecided: bool) -> bool:
        """Return whether to probe the batch that is about to be trained on."""
        is_due = is_undecided or (self._trained >= self._next and (self._are_repeated or not self._trained))
        if is_due:
            self._next = 2 * self._trained + 1
        return is_due

    def count(self, batches: int, needs_probe: bool, is_undecided: bool) -> int:
        """Return how many of these batches come before the next probe: the same number on every placement and in every process."""
        if is_undecided:
            return 1
        return min(batches, max(1, self._next - self._trained)) if needs_probe else batches

    def note_trained(self, batches: int) -> None:
        """Note that these batches were trained on."""
        self._trained += batches
