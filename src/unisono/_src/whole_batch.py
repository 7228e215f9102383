"""A batch that cannot be cut into rows: nodes of graphs beside a label for each graph, or a number for all rows. One replica takes it whole."""

from __future__ import annotations

import dataclasses

import jax

from unisono._src.typing import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WholeBatch:
    """A batch as one row: each of its arrays has an axis of length 1 in front."""

    batch: PyTree


def unwrap_batch(batch: PyTree) -> PyTree:
    """Return a batch as the user's code takes it: without the axis of one row, if it is whole."""
    return jax.tree.map(lambda array: array[0], batch.batch) if isinstance(batch, WholeBatch) else batch
