"""The placement of R logical replicas on D devices. Each device runs a contiguous block."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


def split_evenly(total: int, parts: int) -> tuple[range, ...]:
    """Cut `range(total)` into contiguous ranges of nearly equal size.

    Sizes differ by one at most, the larger ones first.

    >>> split_evenly(10, 4)
    (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
    """
    small, larger = divmod(total, parts)
    ends = itertools.accumulate(small + (part < larger) for part in range(parts))
    return tuple(range(start, end) for start, end in itertools.pairwise((0, *ends)))


@dataclasses.dataclass(frozen=True)
class ProcessPlacement:
    """The processes that train together, each with a block of devices."""

    number: int
    """The number of this process."""
    leads: tuple[jax.Device, ...]
    """The lead of each process, on which it exchanges with the others."""
    counts: tuple[int, ...]
    """The number of devices of each process."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """R logical replicas on the devices of all processes. The first device of this process leads."""

    replicas: int
    devices: tuple[jax.Device, ...]
    """The devices of this process."""
    processes: ProcessPlacement | None = None
    """None if there is one process."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be 1 or more; received replicas={self.replicas}.")
        count = sum(self._counts)
        if count > self.replicas:
            raise ValueError(
                f"{count} devices cannot share {self.replicas} replicas: each device runs at least one. "
                f"Write devices={self.replicas}, or replicas={count} for a global batch cut finer."
            )

    def on_lead(self) -> Placement:
        """Place all replicas of this process on its first device."""
        return dataclasses.replace(self, devices=(self.lead,) * len(self.devices))

    @property
    def has_one_device_in_each_process(self) -> bool:
        """Whether there are several processes, of one device each."""
        return self.processes is not None and set(self.processes.counts) == {1}

    @property
    def lead(self) -> jax.Device:
        """The first device of this process, which has the newest state."""
        return self.devices[0]

    @property
    def fewest_replicas(self) -> int:
        """The fewest replicas that these devices can share: one on each."""
        return sum(self._counts)

    @property
    def blocks(self) -> tuple[range, ...]:
        """The replicas of each device of this process."""
        before = sum(self._counts[: self.processes.number]) if self.processes else 0
        return split_evenly(self.replicas, sum(self._counts))[before : before + len(self.devices)]

    @property
    def of_processes(self) -> tuple[range, ...]:
        """The replicas of each process."""
        blocks = split_evenly(self.replicas, sum(self._counts))
        ends = itertools.accumulate(self._counts, initial=0)
        return tuple(range(blocks[start].start, blocks[end - 1].stop) for start, end in itertools.pairwise(ends))

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.processes.counts if self.processes else (len(self.devices),)
