"""The plan of a global batch. It lists replicas by device, by subtree of the reduction tree, and by number of rows."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from unisono._src.engine import reduction_tree
from unisono._src.placement import Placement, split_evenly


@dataclasses.dataclass(frozen=True)
class ReplicaRun:
    """Neighbouring replicas of one size, which one call runs."""

    size: int
    """The number of rows of each replica."""
    first: int
    """The first replica."""
    before: int
    """The number of replicas before it in the same subtree."""
    count: int
    """The number of replicas."""
    rows: range
    """Their rows in the global batch."""


Runs: TypeAlias = tuple[ReplicaRun | None, ...]
"""For each device the replicas that one call runs there. None if it runs none."""


@dataclasses.dataclass(frozen=True)
class Subtree:
    """A subtree of the reduction tree that one device sums."""

    device: int
    """The index of the device."""
    span: range
    """The leaves under the subtree."""
    runs: tuple[ReplicaRun, ...]
    """Empty if no replica under the subtree has rows."""


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """The replicas of one call: of one size, neighbours on each device."""

    size: int
    runs: Runs
    places: tuple[int, ...]
    """For each device, the position of its first replica among those with rows."""
    is_last: tuple[bool, ...]
    """For each device, whether the sum of its subtree is complete then."""

    @functools.cached_property
    def rows(self) -> tuple[range, ...]:
        """The rows of each device."""
        return tuple(range(0) if run is None else run.rows for run in self.runs)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One subtree of each device. The devices compute these sums in parallel."""

    parts: tuple[Subtree | None, ...]
    """None for a device that has fewer subtrees."""
    rounds: tuple[Round, ...]
    """The calls that run their replicas."""

    @functools.cached_property
    def nodes(self) -> tuple[tuple[range, bool] | None, ...]:
        """The tree node that each device sums, and whether it has rows."""
        return tuple(None if part is None else (part.span, bool(part.runs)) for part in self.parts)


class Shard(NamedTuple):
    """The shard of one replica of this process; it has rows."""

    replica: int
    leaf: int
    """The leaf of the reduction tree."""
    rows: range


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The work on one global batch, on a placement."""

    present: int
    """The number of replicas that have rows."""
    leaves: int
    """The number of leaves of the reduction tree."""
    devices: int
    """The number of devices of this process."""
    parts: tuple[Subtree, ...]
    """The subtrees of this process."""
    first: range
    """The rows of the first replica that has rows."""
    sizes: tuple[int, ...]
    """The number of rows of each replica that has rows, in all processes."""
    size_at_end: int
    """The number of rows of the last replica: its program finishes the step, on every placement."""
    of_processes: tuple[tuple[tuple[range, bool], ...], ...]
    """For each process, the subtrees whose sums it sends, and whether there are rows under them."""
    replicas: tuple[int, ...]
    """The replicas that have rows, in all processes."""

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of this process, one for each replica with rows."""
        return tuple(
            Shard(
                run.first + number,
                part.span.start + run.before + number,
                run.rows[number * run.size : (number + 1) * run.size],
            )
            for part in self.parts
            for run in part.runs
            for number in range(run.count)
        )

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The subtrees of this process, grouped for parallel work."""
        return self.list_layers()

    def list_layers(self, alone: int | None = None) -> tuple[Layer, ...]:
        """List the subtrees in layers. There is at least one layer. The replica `alone` is run in a call of its own."""
        by_device = [[part for part in self.parts if part.device == device] for device in range(self.devices)]
        nothing: tuple[Subtree | None, ...] = (None,) * self.devices  # no replica of this process is in the tree
        layers = list(itertools.zip_longest(*by_device)) or [nothing]
        return tuple(Layer(parts, tuple(list_rounds(parts, alone))) for parts in layers)

    @property
    def rows_of_replicas(self) -> tuple[range, ...]:
        """The rows of each replica with rows, in all processes."""
        ends = itertools.accumulate(self.sizes, initial=self.first.start)
        return tuple(range(start, start + size) for start, size in zip(ends, self.sizes, strict=False))

    def run_alone(self, replica: int) -> ReplicaRun:
        """Build the run of a single replica. It may be of another process."""
        place = self.replicas.index(replica)
        return ReplicaRun(self.sizes[place], replica, 0, 1, self.rows_of_replicas[place])

    @functools.cached_property
    def whole(self) -> Round | None:
        """The one call that runs the whole step, if any.

        Then each device sums one subtree, whose replicas are of the same size on all of them. Several devices have to add up inside of the
        call.
        """
        layer = self.layers[0]
        is_alone = len(self.of_processes) == len(self.layers) == len(layer.rounds) == 1
        return layer.rounds[0] if is_alone and all(part is not None and len(part.runs) == 1 for part in layer.parts) else None

    @functools.cached_property
    def first_round(self) -> Round | None:
        """The replicas of the first call. It is None if no replica of this process has rows."""
        return next((round_ for layer in self.layers for round_ in layer.rounds), None)

    @functools.cached_property
    def nothing(self) -> Round:
        """The call that runs no replica. Its program is the one that ends the step."""
        return make_round(self.size_at_end, {}, self.devices)

    def make_lone_round(self, replica: int, device: int) -> Round:
        """Build the call that runs one replica on a device. The replica may belong to another device."""
        run = self.run_alone(replica)
        return make_round(run.size, {device: run}, self.devices, self.replicas.index(replica))


def split_runs(runs: Sequence[ReplicaRun], replica: int) -> list[ReplicaRun]:
    """Split the runs, so that one replica has its own."""
    pieces: list[ReplicaRun] = []
    for run in runs:
        place = replica - run.first
        if not 0 <= place < run.count:
            pieces.append(run)
            continue
        for start, end in itertools.pairwise(sorted({0, place, place + 1, run.count})):
            rows = run.rows[start * run.size : end * run.size]
            pieces.append(ReplicaRun(run.size, run.first + start, run.before + start, end - start, rows))
    return pieces


def make_round(size: int, runs: Mapping[int, ReplicaRun], devices: int, place: int = 0) -> Round:
    """Build the call of these runs. Each device sums its run by itself."""
    each = range(devices)
    return Round(size, tuple(map(runs.get, each)), (place,) * devices, tuple(device in runs for device in each))


def list_rounds(parts: Sequence[Subtree | None], alone: int | None = None) -> Iterator[Round]:
    """Yield the calls that run the replicas of subtrees.

    Each device has one subtree. Devices whose next replicas have the same size are called together.
    """
    runs_of_devices = [() if part is None else part.runs for part in parts]
    starts = [0 if part is None else part.span.start for part in parts]
    waiting = [list(runs if alone is None else split_runs(runs, alone)) for runs in runs_of_devices]
    while any(waiting):
        lone = [runs[0] if runs and runs[0].first == alone else None for runs in waiting]
        if any(lone):
            chosen: Runs = tuple(lone)
        else:
            size = next(runs[0].size for runs in waiting if runs)
            chosen = tuple(runs[0] if runs and runs[0].size == size else None for runs in waiting)
        for runs, run in zip(waiting, chosen, strict=True):
            if run is not None:
                runs.pop(0)
        size = next(run.size for run in chosen if run is not None)
        is_last = tuple(run is not None and not left for run, left in zip(chosen, waiting, strict=True))
        places = tuple(start + (0 if run is None else run.before) for start, run in zip(starts, chosen, strict=True))
        yield Round(size, chosen, places, is_last)


def plan_batch(rows: int, sizes: tuple[int, ...] | None, placement: Placement) -> BatchPlan:
    """Plan a global batch. `sizes` are the rows of each replica. With None the rows are split evenly."""
    if sizes is None:
        shards = split_evenly(rows, placement.replicas)
    else:
        ends = tuple(itertools.accumulate(sizes))
        shards = tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))
    present = [replica for replica, shard in enumerate(shards) if shard]
    # The leaves are all replicas. Where replicas in the middle have no rows, the leaves are only those with rows, as neighbours.
    leaves = list(range(placement.replicas)) if present == list(range(len(present))) else present

    def cover_block(block: range) -> list[range]:
        """List the subtrees over a block of replicas."""
        block_leaves = range(bisect.bisect_left(leaves, block.start), bisect.bisect_left(leaves, block.stop))
        return reduction_tree.list_subtrees(block_leaves, range(len(leaves))) if block_leaves else []

    parts = tuple(
        Subtree(device, span, group_runs(span, leaves, shards))
        for device, block in enumerate(placement.blocks)
        for span in cover_block(block)
    )
    of_processes = tuple(
        tuple((span, any(shards[leaves[leaf]] for leaf in span)) for span in cover_block(block))
        for block in placement.of_processes
    )
    present_sizes = tuple(len(shards[replica]) for replica in present)
    return BatchPlan(
        len(present),
        len(leaves),
        len(placement.devices),
        parts,
        shards[present[0]],
        present_sizes,
        present_sizes[-1],
        of_processes,
        tuple(present),
    )


def group_runs(span: range, leaves: list[int], shards: Sequence[range]) -> tuple[ReplicaRun, ...]:
    """Group neighbours of one size into runs. There are at most two runs if rows are split evenly."""
    runs: list[ReplicaRun] = []
    for before, leaf in enumerate(span):
        replica = leaves[leaf]
        shard = shards[replica]
        last = runs[-1] if runs else None
        if not shard:
            break
        if last is not None and last.size == len(shard) and last.first + last.count == replica:
            runs[-1] = dataclasses.replace(last, count=last.count + 1, rows=range(last.rows.start, shard.stop))
        else:
            runs.append(ReplicaRun(len(shard), replica, before, 1, shard))
    return tuple(runs)
