"""Who runs what: the replicas of a global batch, by device, by subtree, by number of rows."""

from __future__ import annotations

import dataclasses

from unisono import tree
from unisono.placement import Placement, split_evenly


@dataclasses.dataclass(frozen=True)
class Run:
    """Neighbouring replicas with the same number of rows, which one call of a program runs."""

    size: int
    """The rows of each."""
    first: int
    before: int
    """How many replicas of the same subtree came before."""
    count: int
    rows: range
    """Their rows in the global batch."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A subtree whose sum a device finishes by itself."""

    device: int
    span: range
    runs: tuple[Run, ...]
    """None where no replica of it has rows."""

    @property
    def present(self) -> int:
        """How many of its replicas have rows."""
        return sum(run.count for run in self.runs)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One global batch of so many rows on a placement."""

    rows: int
    present: int
    """How many replicas have rows."""
    parts: tuple[Part, ...]
    size_at_end: int
    """The rows of the last replica: its program finishes the step, on every placement."""

    @property
    def whole(self) -> Run | None:
        """The one run that is the whole step, where one device and one program do."""
        alone = len(self.parts) == 1 and len(self.parts[0].runs) == 1
        return self.parts[0].runs[0] if alone else None


def plan(rows: int, placement: Placement) -> Plan:
    shards = [part for part in split_evenly(rows, placement.replicas) if part]
    parts = tuple(
        Part(device, span, runs_of(span, shards))
        for device, block in enumerate(placement.blocks)
        for span in tree.cover(block, range(placement.replicas))
    )
    return Plan(rows, len(shards), parts, len(shards[-1]))


def runs_of(span: range, shards: list[range]) -> tuple[Run, ...]:
    """At most two: of the larger replicas, then of the smaller."""
    runs = []
    present = range(span.start, min(span.stop, len(shards)))
    for size in sorted({len(shards[r]) for r in present}, reverse=True):
        mine = [r for r in present if len(shards[r]) == size]
        runs.append(Run(size, mine[0], mine[0] - span.start, len(mine), range(shards[mine[0]].start, shards[mine[-1]].stop)))
    return tuple(runs)
