"""Sums of the processes of one machine, in memory that they share.

Each process writes its nodes and its words where the others read them. Then each adds a slice of all nodes, in the order of the reduction tree, and
writes this slice of the total. A small step would wait for messages longer than it computes. A sum has two barriers: behind the first, all nodes are
written; behind the second, all slices of the total. Nodes are written again only behind the second, when all have been read, and slices behind the
next sum's first.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pathlib
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import numpy as np

from unisono._src.engine.exchange.protocol import SumDescription
from unisono._src.engine.packing import PackedTree
from unisono._src.placement import split_evenly
from unisono._src.processes import names
from unisono._src.processes.activity import get_activity
from unisono._src.processes.agreement import Agreement

LINE = 64
"""Bytes of a line of memory. XLA reads an array in place that begins at one."""

MOST_WORDS = 64
HEADER = 2 * LINE + 8 * MOST_WORDS
"""Bytes before the arrays: of the barrier to which the process has come, of a token that tells its memory from others, of its words."""

SPINS = 2000
PAUSE = 50e-6
"""Seconds between two looks at the barrier of another process, after so many looks without a pause."""

IN_ORDER = ("x86_64", "AMD64")
"""Processors on which the writes of a process are seen in their order."""

BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")

Like: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
"""A contribution, in shapes."""

AddNodes: TypeAlias = Callable[[range, Mapping[range, PackedTree | None]], PackedTree | None]
"""Adds sums over a span of replicas, in the order of the tree."""


class Memory:
    """The memory of one process: it writes, the others read."""

    def __init__(self, descriptor: int, is_own: bool) -> None:
        access = mmap.ACCESS_WRITE if is_own else mmap.ACCESS_READ
        self._bytes = np.frombuffer(mmap.mmap(descriptor, 0, access=access), np.uint8)
        self.barrier = self._bytes[:8].view(np.int64)
        """How many barriers the process has come to."""
        self.token = self._bytes[LINE : LINE + 8].view(np.int64)
        self.words = self._bytes[2 * LINE : HEADER].view(np.int64)

    @property
    def room(self) -> int:
        """Bytes for arrays."""
        return len(self._bytes) - HEADER

    def view_tree(self, place: int, like: Like) -> PackedTree:
        """View one of several trees that lie behind one another."""
        start = HEADER + place * count_bytes(like)
        tree: dict[str, np.ndarray] = {}
        for name, leaf in like.items():
            size = leaf.size * leaf.dtype.itemsize
            tree[name] = self._bytes[start : start + size].view(leaf.dtype)
            start += round_up(size)
        return cast(PackedTree, tree)  # XLA reads it in place


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

    def __init__(self, agreement: Agreement, processes: int, add: AddNodes) -> None:
        self._agreement = agreement
        self._processes = processes
        self._add = add
        self._memories: list[Memory] = []
        self._barriers = 0
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
        own = self._memories[self._agreement.number]
        with get_activity().report_busy("computing"):
            for node, place in zip(nodes, views.own, strict=False):
                if node is not None:
                    write_tree(place, node)
        own.words[: len(words)] = words
        self._meet()
        told = np.array([memory.words[: len(words)] for memory in self._memories])
        total = self._add(range(description.leaves), views.slices)
        assert total is not None  # some replica has rows
        write_tree(views.total, total)
        self._meet()
        parts = {name: [np.asarray(part[name]) for part in views.totals] for name in views.total}
        return cast(PackedTree, {name: np.concatenate(of_name) for name, of_name in parts.items()}), told

    def open_room(self, size: int) -> bool:
        """Open shared memory of `size` bytes in each process. Say whether all processes can read one another's memory."""
        descriptor = os.memfd_create("unisono")
        os.ftruncate(descriptor, HEADER + size)
        own = Memory(descriptor, is_own=True)
        own.token[0] = secrets.randbits(62)
        own.barrier[0] = self._barriers
        handles = self._agreement.gather_values("its memory", [os.getpid(), descriptor, int(own.token[0])])
        memories = [own if number == self._agreement.number else open_memory(*handle) for number, handle in enumerate(handles)]
        are_open = self._agreement.gather_values("the memory of the others", None not in memories)
        os.close(descriptor)
        self._memories = [memory for memory in memories if memory is not None]
        self._views = {}
        return all(are_open)

    def _find_views(self, description: SumDescription) -> SumViews:
        """Find the memory of a sum's parts. Larger memory is opened if there is too little."""
        like = description.like
        key = description.leaves, description.nodes, tuple((name, leaf.shape, leaf.dtype) for name, leaf in like.items())
        if key not in self._views:
            slots = max(map(len, description.nodes))
            size = (slots + 1) * count_bytes(like)
            if size > self._memories[0].room and not self.open_room(size):
                raise OSError(
                    f"A sum needs {size} bytes of shared memory in each process, and a process cannot open that of another any more. Set "
                    f"{names.SHARED_MEMORY}=0 in all of them: they send their sums as messages then."
                )
            self._views[key] = self._make_views(description, slots)
        return self._views[key]

    def _make_views(self, description: SumDescription, slots: int) -> SumViews:
        like, number = description.like, self._agreement.number
        bounds = {name: cut_lines(leaf.size, leaf.dtype.itemsize, self._processes) for name, leaf in like.items()}
        slices: dict[range, PackedTree | None] = {}
        for memory, nodes in zip(self._memories, description.nodes, strict=True):
            for slot, (span, has_rows) in enumerate(nodes):
                tree = memory.view_tree(slot, like)
                slices[span] = {name: tree[name][bounds[name][number]] for name in like} if has_rows else None
        totals = [
            {name: vector[bounds[name][process]] for name, vector in memory.view_tree(slots, like).items()}
            for process, memory in enumerate(self._memories)
        ]
        own = [self._memories[number].view_tree(slot, like) for slot in range(slots)]
        return SumViews(own, slices, totals[number], totals)

    def _meet(self) -> None:
        """Wait until all processes have come here. The watch ends this process where another one is lost."""
        self._barriers += 1
        self._memories[self._agreement.number].barrier[0] = self._barriers
        with get_activity().report_waiting("for a sum"):
            for memory in self._memories:
                for look in itertools.count():
                    if memory.barrier[0] >= self._barriers:
                        break
                    os.sched_yield() if look < SPINS else time.sleep(PAUSE)


def open_shared_sum(agreement: Agreement, processes: int, add: AddNodes) -> SharedSum | None:
    """Open memory that all processes share. It is None if they are on several machines, or cannot read one another's memory."""
    is_wanted = os.environ.get(names.SHARED_MEMORY) != "0" and platform.machine() in IN_ORDER
    machine = BOOT.read_text() if is_wanted and hasattr(os, "memfd_create") and BOOT.exists() else ""
    machines = agreement.gather_values("its machine", machine)
    if len(machines) != processes or set(machines) != {machine} or not machine:
        return None
    shared = SharedSum(agreement, processes, add)
    return shared if shared.open_room(LINE) else None


def open_memory(process: int, descriptor: int, token: int) -> Memory | None:
    """Open the memory of another process.

    It is None if this process may not, or if its process numbers are other ones, as in a container.
    """
    try:
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY)
    except OSError:
        return None
    try:
        memory = Memory(opened, is_own=False)
    except (OSError, ValueError):  # of a file that is no memory
        return None
    finally:
        os.close(opened)
    return memory if memory.token[0] == token else None


def write_tree(place: PackedTree, tree: PackedTree) -> None:
    """Write arrays into shared memory, when they are computed."""
    for name, array in tree.items():
        np.copyto(np.asarray(place[name]), np.asarray(array))


def count_bytes(like: Like) -> int:
    return sum(round_up(leaf.size * leaf.dtype.itemsize) for leaf in like.values())


def round_up(size: int) -> int:
    return -(-size // LINE) * LINE


def cut_lines(length: int, itemsize: int, parts: int) -> list[slice]:
    """Cut a vector into slices of whole lines of memory."""
    in_line = LINE // itemsize
    lines = split_evenly(-(-length // in_line), parts)
    return [slice(part.start * in_line, min(part.stop * in_line, length)) for part in lines]
