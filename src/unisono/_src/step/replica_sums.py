"""Adding up what replicas contribute that are run one by one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from unisono._src import reduction_tree
from unisono._src.data.global_batch import GlobalBatch
from unisono._src.exchange.protocol import Elsewhere, Exchange
from unisono._src.placement import Placement
from unisono._src.replica.contribution import add
from unisono._src.step.plan import Plan
from unisono._src.xla.programs import Program

INPUTS = ("trainable_variables", "non_trainable_variables")
"""The groups of the state that every replica reads."""


class Sum:
    """The total of one kind of contribution over all replicas."""

    def __init__(self, placement: Placement, exchange: Exchange) -> None:
        self._placement = placement
        self._exchange = exchange
        self._add = Program(add)

    def __call__(self, contributions: Mapping[int, Any], now: Plan, like: Any, batch: GlobalBatch) -> dict[int, Any]:
        """The total for each home.

        Args:
            contributions: Of those replicas of this process that have rows, by their numbers.
            now: Who has rows.
            like: A contribution, in shapes.
            batch: Of which it is the total.
        """
        leaves = {shard.leaf: contributions[shard.replica] for shard in now.shards}
        nodes: list[dict[range, Any]] = [{} for _ in self._placement.devices]
        for part in now.parts:
            add_here = partial(self._add_on, self._placement.devices[part.device])
            nodes[part.device][part.span] = reduction_tree.total(
                part.span, is_leaf, lambda span: leaves.get(span.start), add_here
            )
        totals = self._exchange.total(nodes, self._add_on, now.leaves, Elsewhere(now.of_processes, like, batch))
        return dict(zip(self._exchange.homes, totals, strict=True))

    def _add_on(self, device: Any, left: Any, right: Any) -> Any:
        return self._add(device, None, left, right)


def is_leaf(span: range) -> bool:
    return len(span) == 1
