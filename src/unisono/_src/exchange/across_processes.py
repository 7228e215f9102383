"""Sums over several processes: copies inside of each, and one program of collectives between their leads.

Each process takes part in the collectives with a single device: collectives over several CPU devices of a process starve.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono._src.exchange.collectives import CollectiveSum
from unisono._src.exchange.protocol import AddFunction, DeviceSums, SumDescription
from unisono._src.exchange.transfers import TransferExchange
from unisono._src.placement import Placement
from unisono._src.typing import PyTree


class ProcessExchange:
    """An exchange between processes; the lead of each process is its home."""

    homes = (0,)

    def __init__(self, placement: Placement) -> None:
        assert placement.processes is not None
        self.placement = placement
        self._number = placement.processes.number
        self._inside = TransferExchange(placement)
        self._between = CollectiveSum(placement.processes.leads, [placement.lead])

    def total(
        self, nodes: Sequence[DeviceSums], add: AddFunction, leaves: int, description: SumDescription | None = None
    ) -> list[PyTree]:
        assert description is not None
        sums = self._inside.on_lead(nodes)
        own_sums = [self._inside.sum_span(span, sums, add) for span, _ in description.spans[self._number]]
        schedule = tuple(tuple((span.start, span.stop, has_rows) for span, has_rows in spans) for spans in description.spans)
        totals, words = self._between.total([own_sums], schedule, leaves, description.like, description.words.collect())
        description.words.receive(words)
        return totals
