"""The digests of the rows of one array of a batch, taken as rows are sent to devices: they lie in a cache then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from unisono._src.digest import count_words, digest_on_host


class RowDigests:
    """The digests of parts of an array. The digest of the whole is the sum of those of parts that cover it."""

    def __init__(self) -> None:
        self.are_wanted = False
        self._digests: dict[range, tuple[int, int]] = {}

    def note(self, rows: range, written: np.ndarray) -> None:
        """Note rows that were written for a device; there are some."""
        self._digests[rows] = digest_part(rows, written)

    def total(self, count: int, read: Callable[[range], np.ndarray]) -> tuple[int, int]:
        """Return the digest of all `count` rows. Those that no device of this process got are read."""
        cover = choose_cover(self._digests, count)
        digests = [self._digests[part] if part in self._digests else digest_part(part, read(part)) for part in cover]
        first, second = (sum(lanes) % 2**32 for lanes in zip(*digests, strict=True))
        return first, second


def digest_part(rows: range, written: np.ndarray) -> tuple[int, int]:
    """Return the digest of rows of an array; they are all of `written`."""
    return digest_on_host(written, count_words(rows.start * math.prod(written.shape[1:]), written.itemsize))


def choose_cover(parts: Iterable[range], count: int) -> list[range]:
    """Return ranges that cover `range(count)` once: parts that do not overlap, and the gaps between them.

    >>> choose_cover([range(2, 4), range(0, 4), range(6, 7)], 8)
    [range(0, 4), range(4, 6), range(6, 7), range(7, 8)]
    """
    cover: list[range] = []
    end = 0
    for part in [*sorted(parts, key=lambda part: (part.start, -part.stop)), range(count, count)]:
        if part.start >= end:
            cover += [range(end, part.start), part]
            end = part.stop
    return [part for part in cover if part]
