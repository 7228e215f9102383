"""Sums over several processes: copies inside of each, and one program of collectives between their leads.

Each process meets the others with a single device: collectives over several CPU devices of a process starve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.exchange.collectives import Meeting
from unisono._src.exchange.protocol import Add, Elsewhere
from unisono._src.exchange.transfers import Transfers
from unisono._src.placement import Placement
from unisono._src.processes import agreement


class AcrossProcesses:
    """The lead of each process is its home."""

    homes = (0,)

    def __init__(self, placement: Placement) -> None:
        assert placement.processes is not None
        self.placement = placement
        self._number = placement.processes.number
        self._inside = Transfers(placement)
        self._between = Meeting(placement.processes.leads, [placement.lead])

    def total(self, nodes: Sequence[Mapping[range, Any]], add: Add, leaves: int, elsewhere: Elsewhere | None = None) -> list[Any]:
        assert elsewhere is not None
        here = self._inside.on_lead(nodes)
        mine = [self._inside.sum_of(span, here, add) for span, _ in elsewhere.spans[self._number]]
        schedule = tuple(tuple((span.start, span.stop, there) for span, there in of) for of in elsewhere.spans)
        wish = agreement.current().wishes
        totals, heard = self._between.total([mine], schedule, leaves, elsewhere.like, (*words_of(elsewhere.batch), wish))
        agreement.current().heard = bool(heard[:, -1].any())
        check_rows(heard[:, :-1])
        return totals


NOWHERE = (-1, -1)
"""The position of a batch that has none."""


def words_of(batch: GlobalBatch) -> tuple[int, int, int]:
    """By which processes know whether they have read the same, each for itself."""
    pass_, number = batch.position or NOWHERE
    return pass_, number, batch.digest


def check_rows(words: np.ndarray) -> None:
    """Those of each process."""
    places, digests = [tuple(of) for of in words[:, :2].tolist()], words[:, 2].tolist()
    other = next((number for number, of in enumerate(words.tolist()) if of != words[0].tolist()), None)
    if other is None:
        return
    if places[other] != places[0]:
        raise ValueError(
            f"Process 0 is at {named(places[0])}, and process {other} at {named(places[other])}: their data have other lengths. {WHOLE_DATA}"
        )
    raise ValueError(
        f"{named(places[0]).capitalize()} has other rows in process {other} than in process 0 (digests {digests[other]:08x} and "
        f"{digests[0]:08x}). {WHOLE_DATA}"
    )


WHOLE_DATA = (
    "Every process reads the whole data and keeps its part, so all must read the same, in the same order: seed every shuffle, and do not "
    "shard by process."
)


def named(place: tuple[int, int]) -> str:
    return "a batch" if place == NOWHERE else f"batch {place[1]} of pass {place[0]}"
