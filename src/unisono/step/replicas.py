"""Running the replicas of a step where the placement says, and adding up what they contribute."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from unisono import tree
from unisono.data.division import GlobalBatch
from unisono.exchange.base import Elsewhere, Exchange
from unisono.placement import Placement
from unisono.replica.contribution import add
from unisono.xla.programs import Program

INPUTS = ("trainable_variables", "non_trainable_variables")
"""The groups of the state that every replica reads."""


class Sum:
    """The total of one kind of contribution over all replicas."""

    def __init__(self, placement: Placement, exchange: Exchange) -> None:
        self._placement = placement
        self._exchange = exchange
        self._add = Program(add)

    def __call__(self, contributions: Mapping[int, Any], present: int, like: Any, batch: GlobalBatch) -> dict[int, Any]:
        """The total for each home.

        Args:
            contributions: Of those replicas of this process that have rows.
            present: How many replicas have rows, wherever they run: the first ones.
            like: A contribution, in shapes.
            batch: Of which it is the total.
        """
        everyone = range(self._placement.replicas)
        nodes = []
        for device, block in zip(self._placement.devices, self._placement.blocks, strict=True):
            run = partial(
                tree.total, known=is_leaf, value=lambda span: contributions.get(span.start), add=partial(self._add_on, device)
            )
            nodes.append({span: run(span) for span in tree.cover(block, everyone)})
        spans = tuple(
            tuple((span, span.start < present) for span in tree.cover(block, everyone)) for block in self._placement.of_processes
        )
        totals = self._exchange.total(nodes, self._add_on, len(everyone), Elsewhere(spans, like, batch))
        return dict(zip(self._exchange.homes, totals, strict=True))

    def _add_on(self, device: Any, left: Any, right: Any) -> Any:
        return self._add(device, None, left, right)


def is_leaf(span: range) -> bool:
    return len(span) == 1
