"""Sums over several processes: copies inside of each, and one program of collectives between their leads.

Each process takes part in the collectives with a single device: collectives over several CPU devices of a process starve.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono._src.data.global_batch import GlobalBatch, Position
from unisono._src.exchange.collectives import CollectiveSum
from unisono._src.exchange.protocol import AddFunction, DeviceSums, SumDescription
from unisono._src.exchange.transfers import TransferExchange
from unisono._src.placement import Placement
from unisono._src.processes import agreement
from unisono._src.typing import PyTree


class ProcessExchange:
    """An exchange between processes; the lead of each process is its home."""

    homes = (0,)

    def __init__(self, placement: Placement) -> None:
        assert placement.processes is not None
        self.placement = placement
        self._number = placement.processes.number
        self._inside = TransferExchange(placement)
        self._between = CollectiveSum(placement.processes.leads, [placement.lead])

    def total(
        self, nodes: Sequence[DeviceSums], add: AddFunction, leaves: int, description: SumDescription | None = None
    ) -> list[PyTree]:
        assert description is not None
        sums = self._inside.on_lead(nodes)
        own_sums = [self._inside.sum_span(span, sums, add) for span, _ in description.spans[self._number]]
        schedule = tuple(tuple((span.start, span.stop, has_rows) for span, has_rows in spans) for spans in description.spans)
        wish = agreement.get_agreement().wishes_to_stop
        words = (*make_words(description.batch), wish)
        totals, all_words = self._between.total([own_sums], schedule, leaves, description.like, words)
        agreement.get_agreement().has_heard_stop_wish = bool(all_words[:, -1].any())
        check_same_rows(all_words[:, :-1])
        return totals


NO_POSITION: Position = (-1, -1)
"""The position of a batch that has none."""


def make_words(batch: GlobalBatch) -> tuple[int, int, int]:
    """Return (pass, batch, digest of the rows), by which the processes compare what each has read."""
    pass_, number = batch.position or NO_POSITION
    return pass_, number, batch.digest


def check_same_rows(words: np.ndarray) -> None:
    """Refuse processes that have read different rows; `words` has a row for each process."""
    positions: list[Position] = [(pass_, number) for pass_, number in words[:, :2].tolist()]
    digests = words[:, 2].tolist()
    other = next((process for process, of_process in enumerate(words.tolist()) if of_process != words[0].tolist()), None)
    if other is None:
        return
    if positions[other] != positions[0]:
        raise ValueError(
            f"Process 0 is at {describe_position(positions[0])}, and process {other} at {describe_position(positions[other])}: their data "
            f"have other lengths. {WHOLE_DATA}"
        )
    raise ValueError(
        f"{describe_position(positions[0]).capitalize()} has other rows in process {other} than in process 0 (digests {digests[other]:08x} "
        f"and {digests[0]:08x}). {WHOLE_DATA}"
    )


WHOLE_DATA = (
    "Every process reads the whole data and keeps its part, so all must read the same, in the same order: seed every shuffle, and do not "
    "shard by process."
)


def describe_position(position: Position) -> str:
    return "a batch" if position == NO_POSITION else f"batch {position[1]} of pass {position[0]}"
