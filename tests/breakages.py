"""Ways to break the engine on purpose, each of which a comparison of fingerprints must see."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from unisono import tree
from unisono.data import division, order
from unisono.exchange import transfers
from unisono.replica import randomness
from unisono.step import divisors, finish


def tree_order(patch: pytest.MonkeyPatch) -> None:
    """Sums from right to left."""
    patch.setattr(tree, "halves", lambda span: (range(span.start, span.start + 1), range(span.start + 1, span.stop)))


def key_rule(patch: pytest.MonkeyPatch) -> None:
    """Random numbers from the state alone: every replica draws the same."""
    patch.setattr(randomness, "for_replica", lambda state, replica: state)


def row_order(patch: pytest.MonkeyPatch) -> None:
    """Every pass has the order of the first."""
    patch.setattr(order.Order, "of_pass", lambda self, count: self.random(0).permutation(count))


def weighting(patch: pytest.MonkeyPatch) -> None:
    """Losses divided as if every replica had the rows of the first."""
    of_shape = divisors.Divisors._of_shape
    patch.setattr(divisors.Divisors, "_of_shape", lambda self, state, parts, replica: of_shape(self, state, parts, 0))


def statistics(patch: pytest.MonkeyPatch) -> None:
    """Moving statistics weighted as if every batch were whole."""
    merged = finish.merged
    patch.setattr(
        finish,
        "merged",
        lambda functions, mode, before, total, rows, present: merged(functions, mode, before, total, 12.0, present),
    )


def rows_of_replicas(patch: pytest.MonkeyPatch) -> None:
    """Rows dealt out like cards, one after another."""
    cut = division.divide

    def dealt(batch, where, position=None):
        if position is not None:
            batch = jax.tree.map(lambda a: np.concatenate([a[r :: where.replicas] for r in range(where.replicas)]), batch)
        return cut(batch, where, position)

    patch.setattr("unisono.data.adapter.divide", dealt)


BREAKAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    f.__name__: f for f in (tree_order, key_rule, row_order, weighting, statistics, rows_of_replicas)
}


def sums_by_device(patch: pytest.MonkeyPatch) -> None:
    """Each device sums what it has, then the devices are summed: what mirrored training with accumulation often does."""

    def total(self, nodes, add):
        lead = self.placement.lead
        values = [jax.device_put(value, lead) for of_device in nodes for value in of_device.values() if value is not None]
        return [functools.reduce(functools.partial(add, lead), values)]

    patch.setattr(tree, "cover", lambda block, span: [block])
    patch.setattr(transfers.Transfers, "total", total)
