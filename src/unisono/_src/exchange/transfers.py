"""Sums by copies to the lead device: for CPU devices of one process, where collectives can starve each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from unisono._src import reduction_tree
from unisono._src.exchange.protocol import AddFunction, DeviceSums, SumDescription
from unisono._src.placement import Placement
from unisono._src.typed_jax import device_put
from unisono._src.typing import PyTree


class TransferExchange:
    """An exchange that copies every device's sums to the lead and adds them there, in the order of the reduction tree."""

    homes = (0,)

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def total(
        self, nodes: Sequence[DeviceSums], add: AddFunction, leaves: int, description: SumDescription | None = None
    ) -> list[PyTree]:
        return [self.sum_span(range(leaves), self.on_lead(nodes), add)]

    def on_lead(self, nodes: Sequence[DeviceSums]) -> dict[range, PyTree | None]:
        """Copy the sums of all devices to the lead."""
        sums = dict(nodes[0])
        away = [item for device_sums in nodes[1:] for item in device_sums.items()]
        if away:
            copies = device_put([value for _, value in away], self.placement.lead)
            sums |= zip((span for span, _ in away), copies, strict=True)
        return sums

    def sum_span(self, span: range, sums: DeviceSums, add: AddFunction) -> PyTree | None:
        """Add sums that lie on the lead, over a span of replicas; return None where none of these replicas has rows."""
        return reduction_tree.sum_tree(span, sums.__contains__, sums.__getitem__, functools.partial(add, self.placement.lead))
