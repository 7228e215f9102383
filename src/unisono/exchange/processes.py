"""Sums over several processes: copies inside of each, and one program of collectives between their leads.

Each process meets the others with a single device: collectives over several CPU devices of a process starve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
        return self._between.total([mine], schedule, leaves, elsewhere.like)
