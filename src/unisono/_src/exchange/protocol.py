"""The protocol between a step and the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.placement import Placement

Add = Callable[[jax.Device, Any, Any], Any]
"""The compiled sum of two contributions on a device: the same machine code on all of them."""


class Elsewhere(NamedTuple):
    """What a process knows of the others' part in a sum."""

    spans: tuple[tuple[tuple[range, bool], ...], ...]
    """For each process, the spans of replicas whose sums it hands on, and whether some of them have rows."""
    like: Any
    """What is added, in shapes: a process may have no replica with rows."""
    batch: GlobalBatch
    """Of which it is a sum: the processes compare what they have read."""


class Exchange(Protocol):
    """Adds over devices. A step calls it once for each sum that it needs, on every process in the same order."""

    placement: Placement

    @property
    def homes(self) -> tuple[int, ...]:
        """The indices of the devices on which totals arrive, the lead's first. What depends on a total is computed on
        each of them, and sent from the lead to devices that are no home."""
        ...

    def total(self, nodes: Sequence[Mapping[range, Any]], add: Add, leaves: int, elsewhere: Elsewhere | None = None) -> list[Any]:
        """The sum over all replicas, once for each home of this process.

        `nodes` has, for each device, the sums that it has finished, by their spans of replicas: the cover of its block
        in the tree over so many leaves. None stands for replicas without rows. All values are trees of arrays of one structure.
        `elsewhere` is needed where several processes take part.
        """
        ...
