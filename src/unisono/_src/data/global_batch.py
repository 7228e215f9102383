"""Global batches on the host, as Keras' loops hand them on, and their rows on the way to the devices."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import sparse

from unisono._src.placement import split_evenly

Position = tuple[int, int]
"""(pass over the data in the model's life, batch in the pass)"""

NUMBERS = "biufcV"
"""Kinds of dtypes that a device can hold."""

ALIGNED = 64
"""Bytes. A CPU device reads a NumPy array that begins at such an address where it lies; others it copies."""

MANY = 4 * 2**20
"""Bytes of the rows that are worth not to be copied within a program."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """One array of a global batch; Keras sees its shape and dtype."""

    source: np.ndarray
    position: Position | None = None
    sizes: tuple[int, ...] | None = None
    """The rows of each replica, where they were dealt out already; else they are split evenly."""
    chosen: np.ndarray | None = None
    """Which rows of the source they are, in order; all where it is None."""
    _sent: dict[Any, jax.Array] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def array(self) -> np.ndarray:
        return self.source if self.chosen is None else self.source[self.chosen]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape if self.chosen is None else (len(self.chosen), *self.source.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """As the devices have it: without 64-bit types, unless JAX was told to keep them."""
        return jax.dtypes.canonicalize_dtype(self.source.dtype)

    def on(self, device: jax.Device, rows: range, shape: tuple[int, ...]) -> jax.Array:
        """Some rows on a device, in an array whose first axes, for the rows, have this shape. They are sent once.

        There may be room for more; what lies behind the rows is not to be read.
        """
        key = device, rows, shape
        if key not in self._sent:
            self._sent[key] = jax.device_put(filled([self], rows, shape, device), device)
        return self._sent[key]

    def put(self, rows: range, place: np.ndarray) -> None:
        """Writes some of the rows there, without a copy in between where they are chosen of an array that lies as they will."""
        if self.chosen is None or self.source.dtype != place.dtype or not self.source.flags.c_contiguous:
            np.copyto(place, self.array[rows.start : rows.stop], casting="unsafe")
        else:  # any other mode than "clip", which never comes to clip here, copies once more
            np.take(self.source, self.chosen[rows.start : rows.stop], axis=0, out=place, mode="clip")


def held(batch: Any, position: Position | None = None, copy: bool = True) -> Any:
    """The batch with `Rows` in place of its arrays.

    Copies unless it is told that nobody writes into the arrays: a generator may put its next batch into the same ones.
    """
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_whole)
    arrays = [leaf if isinstance(leaf, Rows) else as_array(leaf) for leaf in leaves]
    rows_of([array.shape for array in arrays], position)
    return jax.tree.unflatten(structure, [as_rows(array, position, copy) for array in arrays])


def as_rows(array: Rows | np.ndarray, position: Position | None, copy: bool) -> Rows:
    if isinstance(array, Rows):
        return Rows(array.source, position, array.sizes, array.chosen)
    return Rows(np.array(array) if copy else array, position)


def chosen(array: np.ndarray, rows: Any) -> Any:
    """The rows of an array that a slice or their numbers choose; the second are read where they are sent."""
    return Rows(array, chosen=rows) if isinstance(rows, np.ndarray) and array.dtype.kind in NUMBERS else array[rows]


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """What a step needs of a batch."""

    leaves: list[Rows]
    structure: Any

    @property
    def rows(self) -> int:
        return self.leaves[0].shape[0]

    @property
    def position(self) -> Position | None:
        return self.leaves[0].position

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The rows of each replica, unless they are split evenly."""
        return self.leaves[0].sizes

    @functools.cached_property
    def signature(self) -> Hashable:
        """What programs depend on beside the number of rows: structure, shapes, dtypes."""
        return self.structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in self.leaves)

    @functools.cached_property
    def digest(self) -> int:
        """Of all rows, in 31 bits: that processes that read for themselves have read the same."""
        found = 0
        for leaf in self.leaves:
            found = zlib.crc32(np.ascontiguousarray(leaf.array).reshape(-1).view(np.uint8).data, found)
        return found >> 1

    @property
    def row_bytes(self) -> int:
        return sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in self.leaves)

    def tree(self) -> Any:
        return jax.tree.unflatten(self.structure, [leaf.array for leaf in self.leaves])

    def shapes(self, rows: int) -> Any:
        """The batch of so many rows, in shapes."""
        leaves = [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


def global_batch(batch: Any) -> GlobalBatch:
    """A tree of arrays, or of `Rows`, for a step."""
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_whole)
    if not all(isinstance(leaf, Rows) for leaf in leaves):
        return global_batch(held(batch, copy=False))
    return GlobalBatch(leaves, structure)


def sizes_of(batch: GlobalBatch, replicas: int) -> Sequence[int]:
    """The rows of each replica."""
    return batch.sizes or [len(part) for part in split_evenly(batch.rows, replicas)]


def sent(batches: Sequence[GlobalBatch], rows: range, shape: tuple[int, ...], device: jax.Device) -> Any:
    """These rows of each batch, in the order of the batches, on a device: a tree of arrays like those of `Rows.on`."""
    first = batches[0]
    if len(batches) == 1:
        return jax.tree.unflatten(first.structure, [leaf.on(device, rows, shape) for leaf in first.leaves])
    buffers = [filled(leaves, rows, shape, device) for leaves in zip(*(batch.leaves for batch in batches), strict=True)]
    return jax.tree.unflatten(first.structure, jax.device_put(buffers, device))


def filled(batches: Sequence[Rows], rows: range, shape: tuple[int, ...], device: jax.Device) -> np.ndarray:
    """These rows of each, behind one another; what is behind them was not written.

    Where there is room for one replica alone, XLA for CPU reads its rows in place, and orders what comes after in a way that keeps cores
    waiting: a sixth of a step of a small convolutional net. There, room that is not written costs nothing. Many rows are better
    read in place all the same: otherwise the program copies them first.
    """
    tail, dtype = batches[0].shape[1:], batches[0].dtype
    if device.platform == "cpu" and len(shape) == 2 and shape[0] == 1 and math.prod((*shape, *tail)) * dtype.itemsize <= MANY:
        shape = 2, *shape[1:]
    buffer = room((math.prod(shape), *tail), dtype)
    for number, batch in enumerate(batches):
        batch.put(rows, buffer[number * len(rows) : (number + 1) * len(rows)])
    return buffer.reshape(*shape, *tail)


def room(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that was not written yet, where a CPU device can read it in place. Memory is taken as it is written."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


def is_whole(leaf: Any) -> bool:
    """What is one array of a batch, though JAX would look inside."""
    return isinstance(leaf, (Rows, sparse.JAXSparse))


def as_array(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf.todense() if isinstance(leaf, sparse.JAXSparse) else leaf)
    if array.dtype.kind not in NUMBERS:
        raise ValueError(
            f"A batch holds values of type {type(leaf).__name__} and dtype {array.dtype}, which no device can hold. Turn them "
            f"into numbers first, for example by a keras.layers.StringLookup in the data pipeline."
        )
    return array


UNBATCHED = "If each item of the dataset is one row, its batches are missing: write dataset.batch(n)."


def rows_of(shapes: list[tuple[int, ...]], position: Position | None) -> int:
    """The number of rows, on which all arrays of a batch must agree."""
    where = "A batch" if position is None else f"Batch {position[1]}"
    counts = {shape[0] if shape else None for shape in shapes}
    if not shapes or None in counts:
        raise ValueError(
            f"{where} holds {'a scalar' if shapes else 'no array'}; every array needs a first axis of rows. {UNBATCHED * bool(shapes)}".rstrip()
        )
    if len(counts) > 1:
        raise ValueError(
            f"{where} holds arrays of {' and '.join(str(shape[0]) for shape in shapes)} rows; x, y and sample weights "
            f"need the same number. {UNBATCHED}"
        )
    (rows,) = counts
    if not rows:
        raise ValueError(f"{where} has no rows. Leave empty batches out of the dataset.")
    return rows
