"""Running the replicas of a step where the placement says, and adding up what they contribute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from unisono import tree
from unisono.exchange.base import Exchange
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

    def __call__(self, contribution: Callable[[int, int], Any | None]) -> dict[int, Any]:
        """`contribution(device index, replica)` runs a replica, or is None without rows; the total for each home.

        A device runs its replicas from left to right and adds as soon as two neighbours are there, so that it holds a
        logarithm of them at a time.
        """
        nodes, everyone = [], range(self._placement.replicas)
        for index, (device, block) in enumerate(zip(self._placement.devices, self._placement.blocks, strict=True)):
            run = partial(tree.total, known=lambda span: len(span) == 1, add=partial(self._add_on, device))
            value = partial(_of_leaf, contribution, index)
            nodes.append({span: run(span, value=value) for span in tree.cover(block, everyone)})
        totals = self._exchange.total(nodes, self._add_on, self._placement.replicas)
        return dict(zip(self._exchange.homes, totals, strict=True))

    def _add_on(self, device: Any, left: Any, right: Any) -> Any:
        return self._add(device, None, left, right)


def _of_leaf(contribution: Callable[[int, int], Any | None], device: int, span: range) -> Any | None:
    return contribution(device, span.start)
