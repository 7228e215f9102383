"""Global batches on the host, and their way to the devices. Keras' loops pass them on to a step."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.experimental import sparse

from unisono._src.engine.device_mesh import DeviceMesh
from unisono._src.engine.digest import RowDigests
from unisono._src.engine.row_counts import WholeBatch, are_uneven, check_row_counts, unwrap_batch
from unisono._src.kernels.native.step_calls import copy_rows
from unisono._src.placement import split_evenly
from unisono._src.typing import Array, PyTree, Shape, UserBatch

Blocks: TypeAlias = tuple[range, ...]
"""The range of rows of each device."""

Position: TypeAlias = tuple[int, int]
"""(pass over the data in the model's life, batch in the pass)"""

NO_POSITION: Position = (-1, -1)
"""The position of a batch that has none."""

NUMERIC_KINDS = "biufcV"
"""Kinds of dtypes that a device can hold."""

ALIGNMENT = 64
"""Bytes. A CPU device reads a NumPy array in place if it begins at a multiple of this address; it copies other arrays."""

IN_PLACE_BYTES = 4 * 2**20
"""From this size on, in bytes, a program must not copy its rows."""

PAST_CACHES_BYTES = 4 * 2**20
"""From this size on, in bytes, rows are written past the caches. They would push the running step's data out."""


@dataclasses.dataclass(frozen=True, eq=False)
class BatchArray:
    """One array of a global batch. Keras sees its shape and dtype."""

    source: np.ndarray
    position: Position | None = None
    sizes: tuple[int, ...] | None = None
    """The rows of each shard, if shards were given. None: the rows are split evenly."""
    chosen: np.ndarray | None = None
    """The indices of the rows in the source, in order. None: all rows."""
    row_digests: RowDigests = dataclasses.field(default_factory=RowDigests, init=False, repr=False)
    _sent: dict[tuple[DeviceMesh, Blocks, Shape], Array] = dataclasses.field(default_factory=lambda: {}, init=False, repr=False)

    @functools.cached_property
    def array(self) -> np.ndarray:
        return self.source if self.chosen is None else self.source[self.chosen]

    @property
    def compared_rows(self) -> np.ndarray:
        """The rows that processes compare. Of an array on disk this is one, in turn: each process reads only its own rows of the others."""
        if not isinstance(self.source, np.memmap):
            return self.array
        row = 0 if self.position is None else self.position[1] % self.shape[0]
        return self.source[row : row + 1] if self.chosen is None else self.source[self.chosen[row : row + 1]]

    @functools.cached_property
    def as_one_row(self) -> BatchArray:
        """The array as one row, for a batch that is not cut."""
        return BatchArray(self.array[np.newaxis], self.position)

    @functools.cached_property
    def shape(self) -> Shape:
        return self.source.shape if self.chosen is None else (len(self.chosen), *self.source.shape[1:])

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The dtype on the devices. It has the machine's order of bytes, and no 64-bit type unless JAX was told to keep them."""
        return jax.dtypes.canonicalize_dtype(self.source.dtype.newbyteorder("="))

    def on(self, mesh: DeviceMesh, rows: Blocks, shape: Shape) -> Array:
        """Send each device its rows, once, as one array over the devices.

        `shape` are the first axes of each device's block. The block may be larger than the rows; what lies behind them must not be read.
        """
        key = mesh, rows, shape
        if key not in self._sent:
            self._sent[key] = send_blocks([self], rows, shape, mesh)
        return self._sent[key]

    def put(self, rows: range, target: np.ndarray) -> None:
        """Write some of the rows into the target. There is no copy in between if the source has the target's dtype and layout."""
        if self.chosen is None or self.source.dtype != target.dtype or not self.source.flags.c_contiguous:
            target[...] = self.array[rows.start : rows.stop]
        else:
            write_chosen_rows(self.source, self.chosen[rows.start : rows.stop], target)
        if self.row_digests.are_wanted:
            self.row_digests.note(rows, target)

    def digest_rows(self) -> tuple[int, int]:
        """Digest all rows in the form that devices get."""
        return self.row_digests.total(self.shape[0], lambda rows: np.asarray(self.array[rows.start : rows.stop], self.dtype))


def write_chosen_rows(source: np.ndarray, chosen: np.ndarray, target: np.ndarray) -> None:
    """Write chosen rows of an array into a target. Both have the same dtype and C order."""
    if target.nbytes >= PAST_CACHES_BYTES and copy_rows(source, chosen, target):
        return
    # Any other mode than "clip", which never comes to clip here, copies once more.
    np.take(source, chosen, axis=0, out=target, mode="clip")


def wrap_arrays(batch: UserBatch, position: Position | None = None, copy: bool = True, is_cut: bool = True) -> PyTree:
    """Wrap the arrays of a batch in `BatchArray`.

    The arrays are copied, because a generator may put its next batch into the same arrays. `copy=False` says that nobody writes into them.
    `is_cut`: several replicas share the batch, so that all arrays must have the same number of rows.
    """
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_batch_array)
    arrays = [leaf if isinstance(leaf, BatchArray) else convert_array(leaf) for leaf in leaves]
    shapes = [array.shape for array in arrays]
    if is_cut or not are_uneven(shapes):
        check_row_counts(shapes, position)
    return jax.tree.unflatten(structure, [wrap_array(array, position, copy) for array in arrays])


def wrap_array(array: BatchArray | np.ndarray, position: Position | None, copy: bool) -> BatchArray:
    if isinstance(array, BatchArray):
        return BatchArray(array.source, position, array.sizes, array.chosen)
    return BatchArray(np.array(array) if copy else array, position)


def select_rows(array: np.ndarray, rows: slice | np.ndarray) -> BatchArray | np.ndarray:
    """Select rows of an array, by a slice or by indices. Rows by indices are read only when they are sent."""
    return BatchArray(array, chosen=rows) if isinstance(rows, np.ndarray) and array.dtype.kind in NUMERIC_KINDS else array[rows]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class GlobalBatch:
    """A batch in the form that a step takes. To JAX it is a tree without leaves: `jax.device_put` returns it as it is."""

    leaves: list[BatchArray]
    structure: jax.tree_util.PyTreeDef
    is_whole: bool = False
    """Whether it is a `WholeBatch`, which has one row."""

    @functools.cached_property
    def rows(self) -> int:
        return self.leaves[0].shape[0]

    @property
    def counted_rows(self) -> int:
        """The weight of the batch in Keras' means over batches. It is the length of its first array."""
        return next(iter(self.leaves[0].shape[self.is_whole :]), 1)

    @property
    def position(self) -> Position | None:
        return self.leaves[0].position

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The rows of each shard; None if the rows are split evenly."""
        return self.leaves[0].sizes

    @functools.cached_property
    def signature(self) -> Hashable:
        """The structure, row shapes and dtypes. With the number of rows, they decide which program runs."""
        return self.structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in self.leaves)

    @functools.cached_property
    def digest(self) -> int:
        """A digest of the rows that processes compare, of 31 bits."""
        digest = 0
        for leaf in self.leaves:
            digest = zlib.crc32(np.ascontiguousarray(leaf.compared_rows).reshape(-1).view(np.uint8).data, digest)
        return digest >> 1

    @property
    def row_bytes(self) -> int:
        return sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in self.leaves)

    def tree(self) -> PyTree:
        """Build the batch's tree, with plain arrays."""
        return unwrap_batch(jax.tree.unflatten(self.structure, [leaf.array for leaf in self.leaves]))

    def shapes(self, rows: int) -> PyTree:
        """Describe a batch of this number of rows by shapes."""
        leaves = [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


def as_global_batch(batch: UserBatch | GlobalBatch, is_cut: bool = True) -> GlobalBatch:
    """Convert a tree of arrays to a batch that a step takes.

    The leaves may be `BatchArray` already. `is_cut` as in `wrap_arrays`.
    """
    if isinstance(batch, GlobalBatch):
        return batch
    leaves, structure = jax.tree.flatten(batch)  # without asking each whether it is a leaf: loops come here for each batch
    if [leaf for leaf in leaves if not isinstance(leaf, BatchArray)]:
        return as_global_batch(wrap_arrays(batch, copy=False, is_cut=is_cut), is_cut)
    shapes = [leaf.shape for leaf in leaves]
    if not are_uneven(shapes):
        return GlobalBatch(leaves, structure)
    if is_cut:
        check_row_counts(shapes, leaves[0].position)
    return GlobalBatch(
        [leaf.as_one_row for leaf in leaves], jax.tree.structure(WholeBatch(batch), is_leaf=is_batch_array), is_whole=True
    )


def want_row_digests(batches: Sequence[GlobalBatch]) -> None:
    """Digest the rows of these batches when they are sent."""
    for batch in batches:
        for leaf in batch.leaves:
            leaf.row_digests.are_wanted = True


def count_shard_rows(batch: GlobalBatch, replicas: int) -> Sequence[int]:
    """Count the rows of each shard."""
    return batch.sizes or [len(rows) for rows in split_evenly(batch.rows, replicas)]


def send_rows(batches: Sequence[GlobalBatch], rows: Blocks, shape: Shape, mesh: DeviceMesh) -> PyTree:
    """Send these rows of each batch to the devices.

    The batches follow each other in each array, which is made as by `BatchArray.on`.
    """
    first = batches[0]
    if len(batches) == 1:
        return jax.tree.unflatten(first.structure, [leaf.on(mesh, rows, shape) for leaf in first.leaves])
    leaves = zip(*(batch.leaves for batch in batches), strict=True)
    return jax.tree.unflatten(first.structure, [send_blocks(of_steps, rows, shape, mesh) for of_steps in leaves])


def send_blocks(batches: Sequence[BatchArray], rows: Blocks, shape: Shape, mesh: DeviceMesh) -> Array:
    """Send each device its rows of each batch, concatenated. They fill one block, whose first axes have this shape."""
    first = batches[0]
    row_shape = first.shape[1:]
    shape = widen_room(shape, row_shape, first.dtype, mesh.lead)
    blocks = allocate_blocks(len(rows), (math.prod(shape), *row_shape), first.dtype)
    for block, own in zip(blocks, rows, strict=True):
        for number, batch in enumerate(batches if own else ()):
            batch.put(own, block[number * len(own) : (number + 1) * len(own)])
    return mesh.put_blocks([block.reshape(*shape, *row_shape) for block in blocks])


def describe_rows(batch: GlobalBatch, shape: Shape, mesh: DeviceMesh) -> PyTree:
    """Describe in shapes what `send_rows` sends."""
    rooms = [(widen_room(shape, leaf.shape[1:], leaf.dtype, mesh.lead), leaf) for leaf in batch.leaves]
    blocks = [mesh.describe_blocks((*room, *leaf.shape[1:]), leaf.dtype) for room, leaf in rooms]
    return jax.tree.unflatten(batch.structure, blocks)


def widen_room(shape: Shape, row_shape: Shape, dtype: np.dtype, device: jax.Device) -> Shape:
    """Widen the room for rows on a CPU device.

    If there is room for one replica alone, XLA for CPU reads its rows in place, and orders what comes after in a way that keeps cores
    waiting: a sixth of a step of a small convolutional net. Unwritten room costs nothing there. Many rows are better read in place all the
    same: otherwise the program copies them first.
    """
    is_alone = device.platform == "cpu" and len(shape) == 2 and shape[0] == 1
    return (2, *shape[1:]) if is_alone and math.prod((*shape, *row_shape)) * dtype.itemsize <= IN_PLACE_BYTES else shape


def allocate_blocks(count: int, shape: Shape, dtype: np.dtype) -> list[np.ndarray]:
    """Allocate empty arrays that a CPU device can read in place.

    The system gives memory when it is written. Each array has memory of its own: a single block for all is so large that the system takes
    it back after each step, which other threads wait for.
    """
    size = math.prod(shape) * dtype.itemsize
    memories = [np.empty(size + ALIGNMENT, np.uint8) for _ in range(count)]
    starts = [-memory.__array_interface__["data"][0] % ALIGNMENT for memory in memories]
    return [memory[start : start + size].view(dtype).reshape(shape) for memory, start in zip(memories, starts, strict=True)]


def is_batch_array(leaf: object) -> bool:
    """Whether this is one array of a batch. JAX would look inside of it."""
    return isinstance(leaf, (BatchArray, sparse.JAXSparse))


def convert_array(leaf: object) -> np.ndarray:
    """Convert a leaf of a batch to a NumPy array. What no device can hold is refused."""
    array = np.asarray(leaf.todense() if isinstance(leaf, sparse.JAXSparse) else leaf)
    if array.dtype.kind not in NUMERIC_KINDS:
        raise ValueError(
            f"A batch holds values of type {type(leaf).__name__} and dtype {array.dtype}, which no device can hold. Turn them "
            f"into numbers first, for example by a keras.layers.StringLookup in the data pipeline."
        )
    return array
