"""Who runs what: the replicas of a global batch, by device, by subtree, by number of rows."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from unisono._src import reduction_tree
from unisono._src.placement import Placement, split_evenly


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


class Shard(NamedTuple):
    """One replica of this process that has rows."""

    replica: int
    device: int
    leaf: int
    """Of the tree over which is summed."""
    rows: range


@dataclasses.dataclass(frozen=True)
class Plan:
    """One global batch of so many rows on a placement."""

    rows: int
    present: int
    """How many replicas have rows."""
    leaves: int
    """Of the tree over which is summed."""
    parts: tuple[Part, ...]
    """Of this process."""
    first: range
    """The rows of the first replica that has some."""
    sizes: tuple[int, ...]
    """The rows of each replica that has some, wherever it runs."""
    size_at_end: int
    """The rows of the last replica: its program finishes the step, on every placement."""
    of_processes: tuple[tuple[tuple[range, bool], ...], ...]
    """For each process, the subtrees whose sums it hands on, and whether there are rows under them."""

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The replicas of this process that have rows, one by one."""
        return tuple(
            Shard(run.first + i, part.device, part.span.start + run.before + i, run.rows[i * run.size : (i + 1) * run.size])
            for part in self.parts
            for run in part.runs
            for i in range(run.count)
        )

    @property
    def rows_of_replicas(self) -> tuple[range, ...]:
        """The rows of each replica that has some, wherever it runs."""
        ends = itertools.accumulate(self.sizes, initial=self.first.start)
        return tuple(range(start, start + size) for start, size in zip(ends, self.sizes, strict=False))

    @property
    def whole(self) -> Run | None:
        """The one run that is the whole step, where one device and one program do."""
        alone = len(self.of_processes) == 1 and len(self.parts) == 1 and len(self.parts[0].runs) == 1
        return self.parts[0].runs[0] if alone else None


def plan(rows: int, sizes: tuple[int, ...] | None, placement: Placement) -> Plan:
    """`sizes` are the rows of each replica, unless they are split evenly."""
    if sizes is None:
        shards = split_evenly(rows, placement.replicas)
    else:
        ends = tuple(itertools.accumulate(sizes))
        shards = tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))
    present = [replica for replica, shard in enumerate(shards) if shard]
    # Leaves of the tree are replicas; where some in the middle have no rows, those that have some, so that they are neighbours.
    leaves = list(range(placement.replicas)) if present == list(range(len(present))) else present

    def under(block: range) -> list[range]:
        """The subtrees over a block of replicas."""
        mine = range(bisect.bisect_left(leaves, block.start), bisect.bisect_left(leaves, block.stop))
        return reduction_tree.cover(mine, range(len(leaves))) if mine else []

    parts = tuple(
        Part(device, span, runs_of(span, leaves, shards))
        for device, block in enumerate(placement.blocks)
        for span in under(block)
    )
    of_processes = tuple(
        tuple((span, any(shards[leaves[leaf]] for leaf in span)) for span in under(block)) for block in placement.of_processes
    )
    sizes_there = tuple(len(shards[replica]) for replica in present)
    return Plan(rows, len(present), len(leaves), parts, shards[present[0]], sizes_there, sizes_there[-1], of_processes)


def runs_of(span: range, leaves: list[int], shards: Sequence[range]) -> tuple[Run, ...]:
    """Neighbours of one size; at most two runs, where rows are split evenly."""
    runs: list[Run] = []
    for before, leaf in enumerate(span):
        replica, shard = leaves[leaf], shards[leaves[leaf]]
        last = runs[-1] if runs else None
        if not shard:
            break
        if last is not None and last.size == len(shard) and last.first + last.count == replica:
            runs[-1] = dataclasses.replace(last, count=last.count + 1, rows=range(last.rows.start, shard.stop))
        else:
            runs.append(Run(len(shard), replica, before, 1, shard))
    return tuple(runs)
