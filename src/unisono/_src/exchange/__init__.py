"""Exchanges, which add up the contributions of replicas over devices and processes: implementations of one protocol."""

from __future__ import annotations

from unisono._src.exchange.across_processes import ProcessExchange
from unisono._src.exchange.collectives import CollectiveExchange
from unisono._src.exchange.on_lead import LeadExchange
from unisono._src.exchange.protocol import Exchange
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
    """Return the exchange of a placement: collectives between devices of a process that have links of their own, else sums on its lead."""
    has_links = len(set(placement.devices)) > 1 and placement.lead.platform != "cpu"
    return CollectiveExchange(placement) if has_links and placement.processes is None else choose_lead_exchange(placement)


def choose_lead_exchange(placement: Placement) -> LeadExchange:
    """Return the exchange of a placement that adds on the lead of each process."""
    return LeadExchange(placement) if placement.processes is None else ProcessExchange(placement)
