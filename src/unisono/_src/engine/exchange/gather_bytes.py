"""Bytes of all processes, gathered on each of them. So a process gets rows that another one has read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono._src import typed_jax
from unisono._src.engine.device_mesh import AXIS
from unisono._src.engine.exchange.collectives import find_own_data
from unisono._src.engine.exchange.shared_memory import LINE, Memory, SharedMemory, count_room, open_shared_memory, round_up
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.processes.agreement import get_agreement
from unisono._src.typing import Array

WAITING = "for the rows of a batch"

MORE = 2
"""Memory that has become too small is replaced by this many times what is needed, since batches differ in size."""

SMALLEST = 1024
"""Words of the smallest message between machines. Each number of words is a program of its own, so there are few: the powers of two."""


class ByteGatherer(Protocol):
    """Gathers arrays of bytes. Every process calls it in the same order."""

    def __call__(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Give our parts to all, and get those of each process, joined. Each begins at a line of memory. What we gave does not come back."""
        ...


@functools.cache
def get_byte_gatherer(placement: Placement) -> ByteGatherer:
    """Get the gatherer of a placement. There is one for each, since it keeps memory and programs. All processes ask for it together."""
    assert placement.processes is not None
    shared = open_shared_memory(get_agreement(), len(placement.processes.leads))
    return SentBytes(placement.processes.leads, placement.lead) if shared is None else SharedBytes(shared)


class SharedBytes:
    """A gatherer between processes of one machine. Each writes its bytes where the others read them.

    It writes into the two halves of its memory in turns, so that one barrier is enough: behind it all have read what was written the time
    before, into the other half.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._half = 0

    def __call__(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        shared = self._shared
        self._half = 1 - self._half
        size = count_room(part.nbytes for part in parts)
        shared.own.words[self._half] = size
        if size <= self._room:
            write_parts(parts, self._view(shared.own))
        shared.meet(WAITING)
        sizes = [int(memory.words[self._half]) for memory in shared.memories]
        if max(sizes) > self._room:
            shared.enlarge_room(2 * round_up(MORE * max(sizes)), "A batch")
            write_parts(parts, self._view(shared.own))
            shared.meet(WAITING)
        others = [0 if number == shared.number else size for number, size in enumerate(sizes)]
        return [np.array(self._view(memory)[:size]) for memory, size in zip(shared.memories, others, strict=True)]

    @property
    def _room(self) -> int:
        """Bytes of a half."""
        return self._shared.size // 2 // LINE * LINE

    def _view(self, memory: Memory) -> np.ndarray:
        """View the half that is in use."""
        return memory.room[self._half * self._room :]


class SentBytes:
    """A gatherer between machines. One device of each process takes part in a sum, in which each place has one process' bytes, and else zeros."""

    def __init__(self, leads: Sequence[jax.Device], own: jax.Device) -> None:
        self._own = own
        self._number = leads.index(own)
        self._count = len(leads)
        mesh = Mesh(np.array(leads), (AXIS,))
        self._by_process = NamedSharding(mesh, PartitionSpec(AXIS))
        add = jax.shard_map(add_over_processes, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec())
        self._add = typed_jax.jit(add)

    def __call__(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        own_size = np.zeros(self._count, np.uint32)
        own_size[self._number] = count_room(part.nbytes for part in parts)
        ends = [0, *itertools.accumulate(self._total(own_size).tolist())]
        words = np.zeros(max(SMALLEST, 1 << (ends[-1] // 4).bit_length()), np.uint32)
        write_parts(parts, words.view(np.uint8)[ends[self._number] :])
        everything = self._total(words).view(np.uint8)
        gathered = [everything[start:end] for start, end in itertools.pairwise(ends)]
        gathered[self._number] = everything[:0]
        return gathered

    def _total(self, words: np.ndarray) -> np.ndarray:
        own = typed_jax.device_put(words[np.newaxis], self._own)
        shape = self._count, len(words)
        everywhere = jax.make_array_from_single_device_arrays(shape, self._by_process, [own])
        with get_activity().report_waiting(WAITING):
            return np.asarray(find_own_data(self._add(everywhere)))


def add_over_processes(words: Array) -> Array:
    return typed_jax.psum(words[0], AXIS)


def write_parts(parts: Sequence[np.ndarray], target: np.ndarray) -> None:
    """Write parts, each at the begin of a line."""
    start = 0
    for part in parts:
        flat = target[start : start + part.nbytes].view(part.dtype)
        np.copyto(flat.reshape(part.shape), part)
        start += round_up(part.nbytes)
