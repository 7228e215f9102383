"""The protocol between a step and the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from unisono._src.packing import PackedTree
from unisono._src.placement import Placement

Node: TypeAlias = tuple[range, bool]
"""A node of the reduction tree, by its leaves, and whether there are rows under it."""


class Words(Protocol):
    """Whole numbers that the processes tell one another with a sum."""

    def collect(self) -> tuple[int, ...]:
        """Return the words of this process."""
        ...

    def receive(self, words: np.ndarray) -> None:
        """Take the words of all processes: a row for each, in their order."""
        ...


class SumDescription(NamedTuple):
    """A sum over all replicas, as each process describes it."""

    leaves: int
    """The number of leaves of the reduction tree."""
    nodes: tuple[tuple[Node, ...], ...]
    """The nodes whose sums each process sends."""
    like: dict[str, jax.ShapeDtypeStruct]
    """A contribution, in shapes: a process may have no replica with rows."""
    words: Words
    """Whole numbers that each process sends along. The exchange does not understand them."""


class FinishedSums(NamedTuple):
    """Sums that the devices of a process have finished beside one another."""

    nodes: tuple[Node | None, ...]
    """The node of each device; None where a device has none."""
    sums: PackedTree
    """Over the devices, of which each has an array (place, element); its sum is at the first place."""


class Exchange(Protocol):
    """Adds over devices. A step calls it once for each sum that it needs, on every process in the same order."""

    placement: Placement

    def total(self, finished: Sequence[FinishedSums], description: SumDescription) -> PackedTree:
        """Return the last of these arrays, with the sum over all replicas at the first place of each device. Its memory is used again."""
        ...
