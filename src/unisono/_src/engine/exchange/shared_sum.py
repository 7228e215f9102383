"""Sums of the processes of one machine, in memory that they share.

Each process writes its nodes and its words where the others read them. Then each adds a slice of all nodes, in the order of the reduction tree, and
writes this slice of the total. A small step would wait for messages longer than it computes. A sum has two barriers: behind the first, all nodes are
written; behind the second, all slices of the total. Nodes are written again only behind the second, when all have been read, and slices behind the
next sum's first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import numpy as np

from unisono._src.engine.exchange.protocol import SumDescription
from unisono._src.engine.exchange.shared_memory import LINE, Memory, SharedMemory, count_room, round_up
from unisono._src.engine.packing import PackedTree
from unisono._src.placement import split_evenly
from unisono._src.processes.activity import get_activity

Like: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
"""A contribution, in shapes."""

AddNodes: TypeAlias = Callable[[range, Mapping[range, PackedTree | None]], PackedTree | None]
"""Adds sums over a span of replicas, in the order of the tree."""

WAITING = "for a sum"


class SumViews(NamedTuple):
    """Where the parts of one kind of sum lie."""

    own: list[PackedTree]
    """Our nodes."""
    slices: dict[range, PackedTree | None]
    """Our slice of the nodes of all processes; None for a node without rows."""
    total: PackedTree
    """Our slice of the total."""
    totals: list[PackedTree]
    """The slice of each process."""


class SharedSum:
    """A sum over the processes of one machine."""

    def __init__(self, shared: SharedMemory, add: AddNodes) -> None:
        self._shared = shared
        self._add = add
        self._views: dict[object, SumViews] = {}

    def total(
        self, nodes: Sequence[PackedTree | None], description: SumDescription, words: tuple[int, ...]
    ) -> tuple[PackedTree, np.ndarray]:
        """Compute (the total, the integers of all processes).

        Args:
            nodes: Our sums, in the order of the description; None for replicas without rows.
            description: The sum.
            words: Whole numbers that we send to the others.
        """
        views = self._find_views(description)
        own = self._shared.own
        with get_activity().report_busy("computing"):
            for node, place in zip(nodes, views.own, strict=False):
                if node is not None:
                    write_tree(place, node)
        own.words[: len(words)] = words
        self._shared.meet(WAITING)
        told = np.array([memory.words[: len(words)] for memory in self._shared.memories])
        total = self._add(range(description.leaves), views.slices)
        assert total is not None  # some replica has rows
        write_tree(views.total, total)
        self._shared.meet(WAITING)
        parts = {name: [np.asarray(part[name]) for part in views.totals] for name in views.total}
        return cast(PackedTree, {name: np.concatenate(of_name) for name, of_name in parts.items()}), told

    def _find_views(self, description: SumDescription) -> SumViews:
        """Find the memory of a sum's parts. Larger memory is opened if there is too little."""
        like = description.like
        key = description.leaves, description.nodes, tuple((name, leaf.shape, leaf.dtype) for name, leaf in like.items())
        if key not in self._views:
            slots = max(map(len, description.nodes))
            size = (slots + 1) * count_room(map(count_leaf_bytes, like.values()))
            if size > self._shared.size:
                self._shared.enlarge_room(size, "A sum")
                self._views = {}
            self._views[key] = self._make_views(description, slots)
        return self._views[key]

    def _make_views(self, description: SumDescription, slots: int) -> SumViews:
        like, number = description.like, self._shared.number
        bounds = {name: cut_lines(leaf.size, leaf.dtype.itemsize, self._shared.processes) for name, leaf in like.items()}
        slices: dict[range, PackedTree | None] = {}
        for memory, nodes in zip(self._shared.memories, description.nodes, strict=True):
            for slot, (span, has_rows) in enumerate(nodes):
                tree = view_tree(memory, slot, like)
                slices[span] = {name: tree[name][bounds[name][number]] for name in like} if has_rows else None
        totals = [
            {name: vector[bounds[name][process]] for name, vector in view_tree(memory, slots, like).items()}
            for process, memory in enumerate(self._shared.memories)
        ]
        own = [view_tree(self._shared.own, slot, like) for slot in range(slots)]
        return SumViews(own, slices, totals[number], totals)


def view_tree(memory: Memory, place: int, like: Like) -> PackedTree:
    """View one of several trees that lie behind one another."""
    start = place * count_room(map(count_leaf_bytes, like.values()))
    tree: dict[str, np.ndarray] = {}
    for name, leaf in like.items():
        size = count_leaf_bytes(leaf)
        tree[name] = memory.room[start : start + size].view(leaf.dtype)
        start += round_up(size)
    return cast(PackedTree, tree)  # XLA reads it in place


def write_tree(place: PackedTree, tree: PackedTree) -> None:
    """Write arrays into shared memory, when they are computed."""
    for name, array in tree.items():
        np.copyto(np.asarray(place[name]), np.asarray(array))


def count_leaf_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


def cut_lines(length: int, itemsize: int, parts: int) -> list[slice]:
    """Cut a vector into slices of whole lines of memory."""
    in_line = LINE // itemsize
    lines = split_evenly(-(-length // in_line), parts)
    return [slice(part.start * in_line, min(part.stop * in_line, length)) for part in lines]
