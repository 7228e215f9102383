"""The protocol between a step and the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from unisono._src.engine.packing import PackedTree
from unisono._src.placement import Placement

Node: TypeAlias = tuple[range, bool]
"""A node of the reduction tree, by its leaves, and whether it has rows below it."""


class Words(Protocol):
    """Whole numbers that the processes send along with a sum."""

    def collect(self) -> tuple[int, ...]:
        """Collect the words of this process."""
        ...

    def receive(self, words: np.ndarray) -> None:
        """Take the words of all processes, in their order. Each has a row."""
        ...


class SumDescription(NamedTuple):
    """A sum over all replicas, as each process describes it."""

    leaves: int
    """The number of leaves of the reduction tree."""
    nodes: tuple[tuple[Node, ...], ...]
    """The nodes whose sums each process sends."""
    like: dict[str, jax.ShapeDtypeStruct]
    """The shapes of a contribution. A process may have no replica with rows."""
    words: Words
    """Whole numbers that each process sends along. The exchange does not understand them."""


class FinishedSums(NamedTuple):
    """Sums that the devices of a process have finished together."""

    nodes: tuple[Node | None, ...]
    """The node of each device; None if a device has none."""
    sums: PackedTree
    """Arrays over the devices. Each device has an array (index, element), and its sum is at index 0."""


class Exchange(Protocol):
    """Adds over devices. A step calls it once for each sum that it needs, on every process in the same order."""

    placement: Placement
    adds_in_programs: bool
    """Whether programs on these devices may add up inside, so that there is nothing left for `total`."""

    def total(self, finished: Sequence[FinishedSums], description: SumDescription) -> PackedTree:
        """Put the sum over all replicas into the last of these arrays.

        It is at index 0 on each device. The memory of the last array is used again.
        """
        ...
