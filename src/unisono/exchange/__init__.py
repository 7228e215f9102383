"""How devices add up what their replicas contribute: implementations of one protocol."""

from __future__ import annotations

from unisono.exchange.base import Exchange
from unisono.exchange.collectives import Collectives
from unisono.exchange.processes import AcrossProcesses
from unisono.exchange.transfers import Transfers
from unisono.placement import Placement

__all__ = ["AcrossProcesses", "Collectives", "Exchange", "Transfers", "choose"]


def choose(placement: Placement) -> Exchange:
    """Collectives where devices have links of their own; copies between the CPU devices of a process; both for several processes."""
    if placement.processes is not None:
        return AcrossProcesses(placement)
    needs_no_links = len(set(placement.devices)) == 1 or all(device.platform == "cpu" for device in placement.devices)
    return Transfers(placement) if needs_no_links else Collectives(placement)
