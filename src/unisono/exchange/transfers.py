"""Sums by copies to the lead device: for CPU devices of one process, where collectives can starve each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from unisono import tree
from unisono.exchange.base import Add
from unisono.placement import Placement


class Transfers:
    """Every device's nodes are copied to the lead and added there, in the order of the tree."""

    homes = (0,)

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def total(self, nodes: Sequence[Mapping[range, Any]], add: Add, leaves: int) -> list[Any]:
        lead = self.placement.lead
        here = dict(nodes[0])
        away = [item for of_device in nodes[1:] for item in of_device.items()]
        if away:
            copies = jax.device_put([value for _, value in away], lead)
            here |= zip((span for span, _ in away), copies, strict=True)
        return [tree.total(range(leaves), here.__contains__, here.__getitem__, lambda left, right: add(lead, left, right))]
