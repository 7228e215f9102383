"""A batch that is not cut into rows: one replica takes it.

It has nodes of graphs beside a label for each graph, or a number for all rows.
"""

from __future__ import annotations

import dataclasses

import jax

from unisono._src.typing import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WholeBatch:
    """A batch as one row. Each of its arrays has an axis of length 1 in front."""

    batch: PyTree


def unwrap_batch(batch: PyTree) -> PyTree:
    """Take the axis of one row off a whole batch. Any other batch stays as it is."""
    return jax.tree.map(lambda array: array[0], batch.batch) if isinstance(batch, WholeBatch) else batch
