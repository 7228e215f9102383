"""Exchanges, which add up the contributions of replicas over devices and processes: implementations of one protocol."""

from __future__ import annotations

from unisono._src.exchange.across_processes import ProcessExchange
from unisono._src.exchange.collectives import CollectiveExchange
from unisono._src.exchange.protocol import Exchange
from unisono._src.exchange.transfers import TransferExchange
from unisono._src.placement import Placement

__all__ = ["CollectiveExchange", "Exchange", "ProcessExchange", "TransferExchange", "choose_exchange"]


def choose_exchange(placement: Placement) -> Exchange:
    """Return the exchange of a placement.

    Collectives where devices have links of their own; copies between the CPU devices of a process; both for several processes.
    """
    if placement.processes is not None:
        return ProcessExchange(placement)
    needs_no_links = len(set(placement.devices)) == 1 or all(device.platform == "cpu" for device in placement.devices)
    return TransferExchange(placement) if needs_no_links else CollectiveExchange(placement)
