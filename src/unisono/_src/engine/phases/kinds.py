"""Kinds of values, and how the parts of shards are combined, in the order of the tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from unisono._src.engine.reduction_tree import sum_tree
from unisono._src.typed_jax import wrap_key_data
from unisono._src.typing import Array, Shape


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the rows lie along an axis of an array.

    There are `outer` blocks; each has all rows, and each row has `inner` elements.

    Two views of a batch behind each other have `outer` 2; pixels of rows as one axis have `inner` above 1.
    """

    axis: int
    outer: int = 1
    inner: int = 1

    @property
    def per_row(self) -> int:
        """The number of elements of the axis that belong to one row."""
        return self.outer * self.inner

    def at(self, axis: int) -> Layout:
        """The same layout on another axis."""
        return dataclasses.replace(self, axis=axis)

    def matches(self, other: Layout) -> bool:
        """Whether two axes have their rows in the same places."""
        return (self.outer, self.inner) == (other.outer, other.inner)


@dataclasses.dataclass(frozen=True)
class Everywhere:
    """The same for the whole batch. Weights are, merged values, and all that follows from these."""

    level: int = 0
    """The number of successive merges before the value."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """One part for each row. It depends on this row, and on what is the same everywhere."""

    layout: Layout
    level: int = 0


@dataclasses.dataclass(frozen=True)
class Local:
    """One value for each replica, by contract.

    These are statistics with which a layer normalizes the rows of its replica, and what replica code makes of its rows.
    """

    level: int = 0


Kind: TypeAlias = Everywhere | Rows | Local


@dataclasses.dataclass(frozen=True)
class Merge:
    """Shards' parts become one value that is the same everywhere."""

    operation: str = "sum"
    """A key of `OPERATIONS`."""
    base: int | None = None
    """The number of the operand that the merged parts are combined with at the end, if any. Shards have the identity in its place."""


Outcome: TypeAlias = Layout | Merge | None
"""What an output is by a rule: rows, a merge, or a value that is the same in all shards."""

Outcomes: TypeAlias = Sequence[Outcome] | None
"""The outcome of each output; None where no rule holds, so that rows are gathered."""


def list_growing_axes(whole: Shape, shard: Shape) -> list[int]:
    """List the axes whose lengths depend on the number of rows."""
    if len(whole) != len(shard):
        return list(range(max(len(whole), len(shard))))
    return [axis for axis, (of_whole, of_shard) in enumerate(zip(whole, shard, strict=True)) if of_whole != of_shard]


Combine: TypeAlias = Callable[[Array, Array], Array]

OPERATIONS: dict[str, Combine] = {
    "sum": jnp.add,
    "product": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def make_identity(operation: str, like: Array) -> Array:
    """Build the operation's identity element, in the shape of an array."""
    if operation in ("sum", "or", "xor"):
        return jnp.zeros_like(like)
    if operation == "product":
        return jnp.ones_like(like)
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jnp.full_like(like, np.inf if operation == "min" else -np.inf)
    if jnp.issubdtype(like.dtype, jnp.bool_):
        return jnp.full_like(like, operation in ("min", "and"))
    info = jnp.iinfo(like.dtype)
    return jnp.full_like(like, -1 if operation == "and" else info.max if operation == "min" else info.min)


def combine(operation: str, parts: Sequence[Array]) -> Array:
    """Combine the parts of all shards, in the order of the tree."""
    total = sum_tree(range(len(parts)), lambda span: len(span) == 1, lambda span: parts[span.start], OPERATIONS[operation])
    assert total is not None  # there is a part
    return total


def widen(part: Array) -> Array:
    """Convert a part of a sum to the dtype of additions. Half precision becomes float32, booleans become int32."""
    if jnp.issubdtype(part.dtype, jnp.floating) and part.dtype.itemsize < 4:
        return part.astype(jnp.float32)
    return part.astype(jnp.int32) if part.dtype == jnp.bool_ else part


def to_words(part: Array) -> Array:
    """Convert an array to unsigned integers with the same bits. Keys of random numbers get an axis of words."""
    if jnp.issubdtype(part.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(part)
    if part.dtype == jnp.bool_:
        return part.astype(jnp.uint8)
    if jnp.issubdtype(part.dtype, jnp.complexfloating):
        return to_words(jnp.stack([part.real, part.imag], axis=-1))
    return lax.bitcast_convert_type(part, f"uint{8 * part.dtype.itemsize}")


def from_words(words: Array, like: ShapedArray) -> Array:
    """Invert `to_words`. The array had the dtype of `like`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return wrap_key_data(words, impl="threefry2x32")
    if like.dtype == jnp.bool_:
        return words.astype(jnp.bool_)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        parts = lax.bitcast_convert_type(words, jnp.finfo(like.dtype).dtype)
        return lax.complex(parts[..., 0], parts[..., 1])
    return lax.bitcast_convert_type(words, like.dtype)


def put_part(part: Array, layout: Layout, rows: int, start: Array) -> Array:
    """Put a shard's part at its place among zeros for all rows."""
    axis, shape = layout.axis, part.shape
    blocks = part.reshape(*shape[:axis], layout.outer, shape[axis] // layout.per_row, layout.inner, *shape[axis + 1 :])
    whole = jnp.zeros((*shape[:axis], layout.outer, rows, layout.inner, *shape[axis + 1 :]), part.dtype)
    placed = lax.dynamic_update_slice_in_dim(whole, blocks, start, axis + 1)
    return placed.reshape(*shape[:axis], layout.per_row * rows, *shape[axis + 1 :])


def take_part(array: Array, layout: Layout, rows: int, start: Array, size: int) -> Array:
    """Slice a shard's part of an array that has all rows."""
    axis, shape = layout.axis, array.shape
    if layout.outer == 1:
        return lax.dynamic_slice_in_dim(array, start * layout.inner, size * layout.inner, axis)
    blocks = array.reshape(*shape[:axis], layout.outer, rows, layout.inner, *shape[axis + 1 :])
    return lax.dynamic_slice_in_dim(blocks, start, size, axis + 1).reshape(
        *shape[:axis], layout.per_row * size, *shape[axis + 1 :]
    )


def join_parts(parts: Sequence[Array], layout: Layout) -> Array:
    """Join the rows of all shards to one array."""
    axis, shape = layout.axis, parts[0].shape
    if layout.outer == 1:
        return jnp.concatenate(parts, axis)
    blocks = [part.reshape(*shape[:axis], layout.outer, part.shape[axis] // layout.outer, *shape[axis + 1 :]) for part in parts]
    return jnp.concatenate(blocks, axis + 1).reshape(*shape[:axis], sum(part.shape[axis] for part in parts), *shape[axis + 1 :])
