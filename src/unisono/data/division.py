"""A global batch, cut into the rows of each replica and on its way to their devices.

Shards are contiguous and differ by one row at most, the larger first; a replica may have none. No row is padded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.experimental import sparse

from unisono.placement import Placement, split_evenly

Position = tuple[int, int]
"""(pass over the data in the model's life, batch in the pass)"""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Shards:
    """One array of a global batch, as Keras sees it (shape, dtype), in parts: one for each replica, None without rows."""

    parts: tuple[jax.Array | None, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    position: Position | None = None

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.parts,), (self.shape, self.dtype, self.position)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Shards:
        return cls(children[0], *aux)


def divide(batch: Any, placement: Placement, position: Position | None = None) -> Any:
    """The batch with `Shards` in place of its arrays; batches that are divided already pass through."""
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_whole)
    if leaves and all(isinstance(leaf, Shards) for leaf in leaves):
        return batch
    arrays = [as_array(leaf) for leaf in leaves]
    shards = split_evenly(rows_of(arrays, position), placement.replicas)
    owners = [(rows, placement.devices[device]) for rows, device in zip(shards, placement.device_of, strict=True) if rows]
    # Copies: a CPU device reads a NumPy array where it lies, and its owner may write the next batch there meanwhile.
    cut = [[np.array(array[rows.start : rows.stop]) for rows, _ in owners] for array in arrays]
    sent = jax.device_put(cut, [[device for _, device in owners]] * len(arrays))
    missing = (None,) * (placement.replicas - len(owners))
    return jax.tree.unflatten(
        structure,
        [
            Shards((*parts, *missing), array.shape, np.dtype(parts[0].dtype), position)
            for parts, array in zip(sent, arrays, strict=True)
        ],
    )


def is_whole(leaf: Any) -> bool:
    """What is one array of a batch, though JAX would look inside."""
    return isinstance(leaf, (Shards, sparse.JAXSparse))


def as_array(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf.todense() if isinstance(leaf, sparse.JAXSparse) else leaf)
    if array.dtype.kind not in "biufcV":
        raise ValueError(
            f"A batch holds values of type {type(leaf).__name__} and dtype {array.dtype}, which no device can hold. Turn them "
            f"into numbers first, for example by a keras.layers.StringLookup in the data pipeline."
        )
    return array


def rows_of(arrays: list[np.ndarray], position: Position | None) -> int:
    """The number of rows, on which all arrays of a batch must agree."""
    where = "A batch" if position is None else f"Batch {position[1]}"
    counts = {array.shape[0] if array.ndim else None for array in arrays}
    if not arrays or None in counts:
        raise ValueError(f"{where} holds {'no array' if not arrays else 'a scalar'}; every array needs a first axis of rows.")
    if len(counts) > 1:
        raise ValueError(
            f"{where} holds arrays of {' and '.join(str(array.shape[0]) for array in arrays)} rows; x, y and sample weights "
            f"need the same number."
        )
    (rows,) = counts
    if not rows:
        raise ValueError(f"{where} has no rows. Leave empty batches out of the dataset.")
    return rows


@dataclasses.dataclass(frozen=True)
class Divided:
    """What a step needs of a divided batch."""

    shards: list[Any]
    """For each replica with rows, its part of the batch."""
    rows: list[int]
    keys: list[Hashable]
    """For each replica with rows, what its program depends on: structure, shapes, dtypes."""
    position: Position | None

    def on_host(self) -> Any:
        """The whole batch again, as NumPy arrays."""
        return jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *self.shards)

    @property
    def total_rows(self) -> int:
        return sum(self.rows)


def divided(batch: Any, placement: Placement) -> Divided:
    """`batch`, a tree of arrays or of `Shards`, by replica."""
    batch = divide(batch, placement)
    leaves, structure = jax.tree.flatten(batch, is_leaf=lambda leaf: isinstance(leaf, Shards))
    rows = [len(part) for part in split_evenly(leaves[0].shape[0], placement.replicas) if part]
    shards = [jax.tree.unflatten(structure, [leaf.parts[r] for leaf in leaves]) for r in range(len(rows))]
    rest = (structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves))
    return Divided(shards, rows, [(n, *rest) for n in rows], leaves[0].position)
