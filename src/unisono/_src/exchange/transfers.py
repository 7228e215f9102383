"""Sums by copies to the lead device: for CPU devices of one process, where collectives can starve each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from unisono._src import reduction_tree
from unisono._src.exchange.protocol import Add, Elsewhere
from unisono._src.placement import Placement


class Transfers:
    """Every device's nodes are copied to the lead and added there, in the order of the tree."""

    homes = (0,)

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def total(self, nodes: Sequence[Mapping[range, Any]], add: Add, leaves: int, elsewhere: Elsewhere | None = None) -> list[Any]:
        return [self.sum_of(range(leaves), self.on_lead(nodes), add)]

    def on_lead(self, nodes: Sequence[Mapping[range, Any]]) -> dict[range, Any]:
        """The nodes of all devices, copied."""
        here = dict(nodes[0])
        away = [item for of_device in nodes[1:] for item in of_device.items()]
        if away:
            copies = jax.device_put([value for _, value in away], self.placement.lead)
            here |= zip((span for span, _ in away), copies, strict=True)
        return here

    def sum_of(self, span: range, here: Mapping[range, Any], add: Add) -> Any:
        """Over a span of replicas, of nodes that lie on the lead; None where none of them has rows."""
        return reduction_tree.total(span, here.__contains__, here.__getitem__, functools.partial(add, self.placement.lead))
