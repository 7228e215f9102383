"""Rows and weights to probe on: those of replicas, and made-up ones.

The first batch of a training may tell nothing: all zero, all alike, nothing masked, every weight one. A sum over rows is a sum whatever the rows
hold, and so is a mean. So rows may be made up, as long as the code accepts them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from unisono._src.replica.drawn_values import draw_values_like
from unisono._src.replica.marks import mark_rows
from unisono._src.replica.protocol import State
from unisono._src.typed_jax import map_tree
from unisono._src.typing import PyTree, UserBatch

MOST_PAIRS = 16
"""The largest number of pairs of replicas' rows that one probe measures."""


class RowPair(NamedTuple):
    """Two batches to measure together: as many rows as one replica has, and as many others."""

    state: State
    one: PyTree
    other: PyTree

    @classmethod
    def of(cls, state: State, both: PyTree) -> RowPair:
        """Return the two halves of some rows as a pair."""
        half = len(jax.tree.leaves(both)[0]) // 2
        return cls(state, slice_rows(both, range(half)), slice_rows(both, range(half, 2 * half)))

    @property
    def both(self) -> PyTree:
        return map_tree(lambda one, other: np.concatenate([one, other]), self.one, self.other)

    @property
    def batches(self) -> list[tuple[PyTree, int]]:
        """Return the batches to run on, each with its rows over those of one part."""
        return [(self.one, 1), (self.other, 1), (self.both, 2)]


def pair_shards(state: State, batch: PyTree, shards: Sequence[range], first: int = 0, most: int = MOST_PAIRS) -> list[RowPair]:
    """Return pairs of the shards of neighbouring replicas, from pair number `first` on. Shards of another size than the first are left out.
    One replica alone is paired with itself."""
    alike = [shard for shard in shards if len(shard) == len(shards[0])]
    pairs = list(zip(alike[::2], alike[1::2], strict=False)) or [(alike[0], alike[0])]
    chosen = [pairs[(first + number) % len(pairs)] for number in range(min(most, len(pairs)))]
    return [RowPair(state, slice_rows(batch, one), slice_rows(batch, other)) for one, other in chosen]


def slice_rows(batch: PyTree, rows: range) -> PyTree:
    return map_tree(operator.itemgetter(slice(rows.start, rows.stop)), batch)


def make_up_rows(batch: UserBatch, compared: Mapping[int, set[float]]) -> list[UserBatch]:
    """Return made-up batches with as many rows as `batch`, to measure on as well.

    `compared` holds the numbers that code compares the arrays of the batch with, by the arrays' positions among its leaves.
    """
    rng = np.random.default_rng(0)
    arrays, structure = jax.tree.flatten(batch)
    leaves = [np.asarray(array) for array in arrays]
    drawn = [draw_values_like(rng, leaf) for leaf in leaves]
    made = [drawn, *mark_rows(rng, leaves, compared), *mark_rows(rng, drawn, compared)]
    return [jax.tree.unflatten(structure, made_leaves) for made_leaves in made]
