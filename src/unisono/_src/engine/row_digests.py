"""Digests of the rows of one array of a batch. They are taken as rows are sent to devices: the rows lie in a cache then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from unisono._src.engine.digest import count_words, digest_on_host


class RowDigests:
    """The digests of parts of an array. The digest of the whole is the sum over parts that cover it."""

    def __init__(self) -> None:
        self.are_wanted = False
        self._digests: dict[range, tuple[int, int]] = {}

    def note(self, rows: range, written: np.ndarray) -> None:
        """Note rows that were written for a device. There is at least one."""
        self._digests[rows] = digest_part(rows, written)

    def total(self, count: int, read: Callable[[range], np.ndarray]) -> tuple[int, int]:
        """Digest all `count` rows. Rows that no device of this process got are read."""
        cover = choose_cover(self._digests, count)
        digests = [self._digests[part] if part in self._digests else digest_part(part, read(part)) for part in cover]
        first, second = (sum(lanes) % 2**32 for lanes in zip(*digests, strict=True))
        return first, second


def digest_part(rows: range, written: np.ndarray) -> tuple[int, int]:
    """Digest the range `rows` of an array. `written` holds exactly these rows."""
    return digest_on_host(written, count_words(rows.start * math.prod(written.shape[1:]), written.itemsize))


def choose_cover(parts: Iterable[range], count: int) -> list[range]:
    """Choose ranges that cover `range(count)` once.

    These are parts that do not overlap, and the gaps between them.

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
