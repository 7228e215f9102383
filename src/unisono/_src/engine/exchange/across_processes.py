"""Sums over several processes.

They are added on the lead of each process, then between the leads. Processes of one machine share memory. Others take part in one
program of collectives, each with a single device: collectives over several CPU devices of a process starve.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from unisono._src.engine.exchange.collectives import ProcessSum
from unisono._src.engine.exchange.on_lead import LeadExchange
from unisono._src.engine.exchange.protocol import SumDescription
from unisono._src.engine.exchange.shared_memory import open_shared_memory
from unisono._src.engine.exchange.shared_sum import SharedSum
from unisono._src.engine.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.processes.agreement import get_agreement


class ProcessExchange(LeadExchange):
    """An exchange between processes."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        assert placement.processes is not None
        self._processes = placement.processes

    def total_on_lead(self, sums: Mapping[range, PackedTree | None], description: SumDescription) -> PackedTree:
        own = [self.sum_span(span, sums) for span, _ in description.nodes[self._processes.number]]
        total, words = self._between.total(own, description, description.words.collect())
        description.words.receive(words)
        return total

    @functools.cached_property
    def _between(self) -> SharedSum | ProcessSum:
        """The all-reduce between processes. It uses shared memory if there is any, and collectives otherwise."""
        shared = None
        if self.placement.lead.platform == "cpu":
            shared = open_shared_memory(get_agreement(), len(self._processes.leads))
        return ProcessSum(self._processes.leads, self.placement.lead) if shared is None else SharedSum(shared, self.sum_span)
