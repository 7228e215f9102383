"""Where the replicas run: R logical replicas in contiguous blocks on D devices."""

from __future__ import annotations

import dataclasses
import itertools

import jax


def split_evenly(total: int, parts: int) -> tuple[range, ...]:
    """`range(total)` cut into contiguous parts whose sizes differ by one at most, the larger first.

    >>> split_evenly(10, 4)
    (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
    """
    small, larger = divmod(total, parts)
    ends = itertools.accumulate(small + (part < larger) for part in range(parts))
    return tuple(range(start, end) for start, end in itertools.pairwise((0, *ends)))


@dataclasses.dataclass(frozen=True)
class Placement:
    """R logical replicas on D devices of this process; the first device leads."""

    replicas: int
    devices: tuple[jax.Device, ...]

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be 1 or more; received replicas={self.replicas}.")
        if len(self.devices) > self.replicas:
            raise ValueError(
                f"{len(self.devices)} devices cannot share {self.replicas} replicas: each device runs at least one. "
                f"Write devices={self.replicas}, or replicas={len(self.devices)} for a global batch cut finer."
            )

    @property
    def lead(self) -> jax.Device:
        return self.devices[0]

    @property
    def blocks(self) -> tuple[range, ...]:
        """The replicas of each device."""
        return split_evenly(self.replicas, len(self.devices))

    @property
    def device_of(self) -> tuple[int, ...]:
        """For each replica, the index of its device."""
        return tuple(index for index, block in enumerate(self.blocks) for _ in block)
