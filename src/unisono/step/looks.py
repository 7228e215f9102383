"""When a batch is looked at before it is trained on."""

from __future__ import annotations


class Looks:
    """The first batch is looked at, the second, the fourth, the eighth, ...; and every one as long as something is undecided.

    After the first, a look costs two forward passes over two replicas' rows, so that N batches cost about log2 N of these.

    >>> looks = Looks()
    >>> [looks.is_due(1, is_undecided=False) for _ in range(9)]
    [True, True, False, True, False, False, False, True, False]
    """

    def __init__(self, are_repeated: bool = True) -> None:
        """`are_repeated`: whether there are more looks where nothing is undecided."""
        self._batches = 0
        self._are_repeated = are_repeated

    def is_due(self, batches: int, is_undecided: bool) -> bool:
        """Return whether to look at the first of these batches, which are about to be trained on."""
        before = self._batches
        self._batches += batches
        is_next = before.bit_length() < self._batches.bit_length()
        return is_undecided or (is_next and (self._are_repeated or not before))
