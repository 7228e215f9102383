"""Ways to break the engine on purpose, each of which a comparison of fingerprints must see."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono import tree
from unisono.data import adapter, order
from unisono.data.division import Rows, is_whole
from unisono.exchange import transfers
from unisono.replica import assigned, randomness
from unisono.step import sums
from unisono.step.step import Step


def tree_order(patch: pytest.MonkeyPatch) -> None:
    """Sums from right to left."""
    patch.setattr(tree, "halves", lambda span: (range(span.start, span.start + 1), range(span.start + 1, span.stop)))


def order_within_a_device(patch: pytest.MonkeyPatch) -> None:
    """Sums one after another within a device."""

    def pushed(held, before, value):
        there = sums.get(held)
        return sums.put(held, 0, {n: jnp.where(before > 0, there[n] + new, new) for n, new in value.items()})

    patch.setattr(sums, "pushed", pushed)
    patch.setattr(sums, "folded", lambda held, count: held)


def key_rule(patch: pytest.MonkeyPatch) -> None:
    """Random numbers from the state alone: every replica draws the same."""
    patch.setattr(randomness, "for_replica", lambda state, replica: state)


def row_order(patch: pytest.MonkeyPatch) -> None:
    """Every pass has the order of the first."""
    patch.setattr(order.Order, "of_pass", lambda self, count: self.random(0).permutation(count))


def weighting(patch: pytest.MonkeyPatch) -> None:
    """Losses divided as if every replica had the rows of the first."""
    sizes = Step._sizes
    patch.setattr(Step, "_sizes", lambda self, batch: sizes(self, batch)[:1] * len(sizes(self, batch)))


def statistics(patch: pytest.MonkeyPatch) -> None:
    """Moving statistics weighted as if every batch were whole."""
    merged = assigned.merged
    patch.setattr(assigned, "merged", lambda *args: merged(*args[:5], 12.0, args[6]))


def rows_of_replicas(patch: pytest.MonkeyPatch) -> None:
    """Rows dealt out like cards, one after another."""
    held = adapter.held

    def dealt(batch, *args, **options):
        like_cards = lambda rows: Rows(np.concatenate([rows.array[r::8] for r in range(8)]), rows.position)
        return jax.tree.map(like_cards, held(batch, *args, **options), is_leaf=is_whole)

    patch.setattr(adapter, "held", dealt)


BREAKAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    f.__name__: f for f in (tree_order, order_within_a_device, key_rule, row_order, weighting, statistics, rows_of_replicas)
}


def sums_by_device(patch: pytest.MonkeyPatch) -> None:
    """Each device sums what it has, then the devices are summed: what mirrored training with accumulation often does."""

    def total(self, nodes, add, leaves, elsewhere=None):
        lead = self.placement.lead
        values = [jax.device_put(value, lead) for of_device in nodes for value in of_device.values() if value is not None]
        return [functools.reduce(functools.partial(add, lead), values)]

    patch.setattr(tree, "cover", lambda block, span: [block])
    patch.setattr(transfers.Transfers, "total", total)
