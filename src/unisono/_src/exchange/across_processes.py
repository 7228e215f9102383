"""Sums over several processes.

Each process adds on its lead, and one program of collectives adds between the leads.

Each process takes part in the collectives with a single device: collectives over several CPU devices of a process starve.
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.exchange.collectives import ProcessSum
from unisono._src.exchange.on_lead import LeadExchange
from unisono._src.exchange.protocol import SumDescription
from unisono._src.packing import PackedTree
from unisono._src.placement import Placement


class ProcessExchange(LeadExchange):
    """An exchange between processes."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        assert placement.processes is not None
        self._number = placement.processes.number
        self._between = ProcessSum(placement.processes.leads, placement.lead)

    def total_on_lead(self, sums: Mapping[range, PackedTree | None], description: SumDescription) -> PackedTree:
        own = [self.sum_span(span, sums) for span, _ in description.nodes[self._number]]
        total, words = self._between.total(own, description, description.words.collect())
        description.words.receive(words)
        return total
