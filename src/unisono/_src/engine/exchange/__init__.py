"""Exchanges: they add up replicas' contributions over devices and processes. All implement one protocol."""

from __future__ import annotations

from unisono._src.engine.exchange.across_processes import ProcessExchange
from unisono._src.engine.exchange.collectives import CollectiveExchange
from unisono._src.engine.exchange.on_lead import LeadExchange
from unisono._src.engine.exchange.protocol import Exchange
from unisono._src.placement import Placement

__all__ = [
    "CollectiveExchange",
    "Exchange",
    "LeadExchange",
    "ProcessExchange",
    "choose_exchange",
    "choose_lead_exchange",
]


def choose_exchange(placement: Placement) -> Exchange:
    """Choose the exchange of a placement.

    Devices of one process that have links of their own use collectives. All others add on the lead, CPU devices only where they cannot add up
    inside of programs.
    """
    has_links = len(set(placement.devices)) > 1 and placement.lead.platform != "cpu"
    return CollectiveExchange(placement) if has_links and placement.processes is None else choose_lead_exchange(placement)


def choose_lead_exchange(placement: Placement) -> LeadExchange:
    """Choose an exchange that adds on each process' lead."""
    return LeadExchange(placement) if placement.processes is None else ProcessExchange(placement)
