"""Kinds of values in a step.

A value is the same everywhere, or has a part for each row, or is a replica's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from unisono._src.typing import Shape


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
    """A key of `combine.OPERATIONS`."""
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
