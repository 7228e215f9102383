"""Sums over several processes: copies inside of each, and one program of collectives between their leads.

Each process meets the others with a single device: collectives over several CPU devices of a process starve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unisono.data.division import GlobalBatch
from unisono.exchange.base import Add, Elsewhere
from unisono.exchange.collectives import Meeting
from unisono.exchange.transfers import Transfers
from unisono.placement import Placement


class AcrossProcesses:
    """The lead of each process is its home."""

    homes = (0,)

    def __init__(self, placement: Placement) -> None:
        assert placement.processes is not None
        self.placement = placement
        self._number = placement.processes.number
        self._inside = Transfers(placement)
        self._between = Meeting(placement.processes.leads, [placement.lead])

    def total(self, nodes: Sequence[Mapping[range, Any]], add: Add, leaves: int, elsewhere: Elsewhere | None = None) -> list[Any]:
        assert elsewhere is not None
        here = self._inside.on_lead(nodes)
        mine = [self._inside.sum_of(span, here, add) for span, _ in elsewhere.spans[self._number]]
        schedule = tuple(tuple((span.start, span.stop, there) for span, there in of) for of in elsewhere.spans)
        words = () if elsewhere.batch is None else (elsewhere.batch.digest,)
        totals, heard = self._between.total([mine], schedule, leaves, elsewhere.like, words)
        if elsewhere.batch is not None:
            check_rows(elsewhere.batch, heard[:, 0])
        return totals


def check_rows(batch: GlobalBatch, digests: np.ndarray) -> None:
    """Of the processes, which each read for themselves: all must have the same."""
    other = next((number for number, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        where = "A batch" if batch.position is None else f"Batch {batch.position[1]} of pass {batch.position[0]}"
        raise ValueError(
            f"{where} has other rows in process {other} than in process 0 (digests {digests[other]:08x} and {digests[0]:08x}). Every process "
            f"reads the whole data and keeps its part, so all must read the same, in the same order: seed every shuffle, and do not "
            f"shard by process."
        )
