"""The protocol between a step and the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from unisono._src.placement import Placement
from unisono._src.typing import PyTree

AddFunction: TypeAlias = Callable[[jax.Device, PyTree, PyTree], PyTree]
"""The compiled sum of two contributions on a device: the same machine code on all devices."""

DeviceSums: TypeAlias = Mapping[range, PyTree | None]
"""The finished sums of a device, by the spans of replicas that they add up. None stands for replicas without rows."""


class Words(Protocol):
    """Whole numbers that the processes tell one another with a sum."""

    def collect(self) -> tuple[int, ...]:
        """Return the words of this process."""
        ...

    def receive(self, words: np.ndarray) -> None:
        """Take the words of all processes: a row for each, in their order."""
        ...


class SumDescription(NamedTuple):
    """A sum over several processes, as each of them describes it."""

    spans: tuple[tuple[tuple[range, bool], ...], ...]
    """For each process, the spans of replicas whose sums it sends, and whether some of these replicas have rows."""
    like: PyTree
    """A contribution, in shapes: a process may have no replica with rows."""
    words: Words
    """Whole numbers that each process sends along. The exchange does not understand them."""


class Exchange(Protocol):
    """Adds over devices. A step calls it once for each sum that it needs, on every process in the same order."""

    placement: Placement

    @property
    def homes(self) -> tuple[int, ...]:
        """Return the indices of the devices on which totals arrive, the lead's first.

        A result that depends on a total is computed on each of them, and sent from the lead to the other devices.
        """
        ...

    def total(
        self, nodes: Sequence[DeviceSums], add: AddFunction, leaves: int, description: SumDescription | None = None
    ) -> list[PyTree]:
        """Return the sum over all replicas, once for each home of this process.

        Args:
            nodes: For each device the sums that it has finished: the cover of its block in the reduction tree. All values have one structure.
            add: Adds two of them.
            leaves: The number of leaves of the reduction tree.
            description: Needed where several processes take part.
        """
        ...
