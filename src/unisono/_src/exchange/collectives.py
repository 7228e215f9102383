"""Sums by one jitted program of collectives: for devices with links of their own.

Every device gets a piece of all nodes (all-to-all), adds them in the order of the tree, and hands its piece of the total to
the others (all-gather). Two devices with a node each tell each other theirs instead, as much to send in one go. No library's
all-reduce: the order of its additions is not ours to choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono._src import reduction_tree
from unisono._src.exchange.protocol import Add, Elsewhere
from unisono._src.packing import flat, unflat
from unisono._src.placement import Placement
from unisono._src.processes.progress import current
from unisono._src.xla.determinism import compiler_options
from unisono._src.xla.programs import Program

Schedule = tuple[tuple[tuple[int, int, bool], ...], ...]
"""For each device, its nodes: (first replica, last replica + 1, whether there were rows)."""

AXIS = "devices"

BLOCK = 1_250_000
"""On CPU long vectors are summed in blocks of about so many elements: what was received is added while it is still in the cache."""


class Collectives:
    """All devices are homes: each has the whole total."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.homes = tuple(range(len(placement.devices)))
        self._meeting = Meeting(placement.devices, placement.devices)

    def total(self, nodes: Sequence[Mapping[range, Any]], add: Add, leaves: int, elsewhere: Elsewhere | None = None) -> list[Any]:
        schedule = tuple(tuple((s.start, s.stop, value is not None) for s, value in of.items()) for of in nodes)
        example = next(value for of in nodes for value in of.values() if value is not None)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), example)
        return self._meeting.total([list(of.values()) for of in nodes], schedule, leaves, shapes)[0]


class Meeting:
    """Devices that add up what they hold; in several processes, each sees to its own."""

    def __init__(self, devices: Sequence[jax.Device], own: Sequence[jax.Device]) -> None:
        self._devices = tuple(devices)
        self._own = tuple(own)
        self._mesh = Mesh(np.array(self._devices), (AXIS,))
        self._pack = Program(self._packed)
        self._unpack = Program(unpacked)
        self._programs: dict[Any, Any] = {}

    def total(
        self, nodes: Sequence[Sequence[Any]], schedule: Schedule, leaves: int, shapes: Any, words: tuple[int, ...] = ()
    ) -> tuple[list[Any], np.ndarray]:
        """(The total on each of our own devices, the words of all.)

        Args:
            nodes: What each of them has, in the order of the schedule; None for replicas without rows.
            schedule: Of all devices.
            leaves: Of the tree over which is summed.
            shapes: Of what is added.
            words: What each of our devices tells the others.
        """
        key = (
            leaves,
            schedule,
            jax.tree.structure(shapes),
            tuple((a.shape, a.dtype) for a in jax.tree.leaves(shapes)),
            len(words),
        )
        slots = max(map(len, schedule))
        packed = [self._packed_on(device, key, slots, of, shapes) for device, of in zip(self._own, nodes, strict=True)]
        arrays = {name: self._global([of[name] for of in packed]) for name in packed[0]}
        told = self._global([jax.device_put(np.array([words], np.int32), device) for device in self._own]) if words else None
        if key not in self._programs:
            options = compiler_options(self._own[0].platform)
            self._programs[key] = jax.jit(partial(self._summed, leaves, schedule), compiler_options=options)
        one_at_a_time = jax.block_until_ready if self._own[0].platform == "cpu" else lambda arrays: arrays
        # On CPU nothing else may be in flight: there collectives starve each other, and share their threads with the replicas.
        with current().busy("computing"):
            arrays = one_at_a_time(arrays)
        with current().waiting("for a sum"):
            sums, heard = one_at_a_time(self._programs[key](arrays, told))
        by_device = [{name: piece(array, device) for name, array in sums.items()} for device in self._own]
        totals = [
            self._unpack(device, key, flat, jax.tree.map(lambda s: np.empty((0, *s.shape), s.dtype), shapes))
            for device, flat in zip(self._own, by_device, strict=True)
        ]
        return totals, np.asarray(piece(heard, self._own[0])) if words else np.zeros((0, 0), np.int32)

    def _packed_on(self, device: jax.Device, key: Any, slots: int, nodes: Sequence[Any], shapes: Any) -> Any:
        zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
        values = [zeros if value is None else value for value in nodes]
        return self._pack(device, (key, len(values)), values + [zeros] * (slots - len(values)))

    def _packed(self, nodes: list[Any]) -> dict[str, jax.Array]:
        """For each dtype (1, node, block, element), in blocks of a width that the devices can share out."""
        flats = [flat(node) for node in nodes]
        return {name: self._in_blocks(jnp.stack([flat[name] for flat in flats]))[None] for name in flats[0]}

    def _in_blocks(self, nodes: jax.Array) -> jax.Array:
        count, width = nodes.shape
        blocks = max(1, round(width / BLOCK)) if self._own[0].platform == "cpu" else 1
        return jnp.pad(nodes, ((0, 0), (0, -width % (blocks * len(self._devices))))).reshape(count, blocks, -1)

    def _global(self, parts: list[jax.Array]) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        return jax.make_array_from_single_device_arrays((len(self._devices), *parts[0].shape[1:]), sharding, parts)

    def _summed(
        self, leaves: int, schedule: Schedule, arrays: dict[str, jax.Array], told: Any
    ) -> tuple[dict[str, jax.Array], Any]:
        here, nowhere = PartitionSpec(AXIS), PartitionSpec()

        def on_device(arrays: dict[str, jax.Array], told: Any) -> tuple[dict[str, jax.Array], Any]:
            heard = jax.tree.map(lambda words: lax.all_gather(words[0], AXIS), told)
            return jax.tree.map(partial(self._sum_of, leaves, schedule), arrays), heard

        run = jax.shard_map(on_device, mesh=self._mesh, in_specs=here, out_specs=nowhere, check_vma=False)
        return run(arrays, told)

    def _sum_of(self, leaves: int, schedule: Schedule, mine: jax.Array) -> jax.Array:
        """Of what the devices have, of which `mine` (1, node, block, element) is here."""
        _, nodes, blocks, _ = mine.shape
        in_pairs = len(schedule) == 2 and nodes == 1

        def sum_of_block(number: Any) -> jax.Array:
            block = lax.dynamic_index_in_dim(mine[0], number, axis=1, keepdims=False)
            pieces = told_each_other(block) if in_pairs else dealt_out(block, len(schedule))
            total = self._total(leaves, schedule, pieces)
            return total if in_pairs else lax.all_gather(total, AXIS, tiled=True)

        return sum_of_block(0) if blocks == 1 else lax.map(sum_of_block, jnp.arange(blocks)).reshape(-1)

    def _total(self, leaves: int, schedule: Schedule, pieces: jax.Array) -> Any:
        known = {
            range(start, stop): pieces[device, slot] if there else None
            for device, nodes in enumerate(schedule)
            for slot, (start, stop, there) in enumerate(nodes)
        }
        return reduction_tree.total(range(leaves), known.__contains__, known.__getitem__, jnp.add)


def dealt_out(nodes: jax.Array, devices: int) -> jax.Array:
    """(device, node, this device's piece of it)"""
    pieces = nodes.reshape(len(nodes), devices, -1)
    return lax.all_to_all(pieces, AXIS, split_axis=1, concat_axis=0)


def told_each_other(nodes: jax.Array) -> jax.Array:
    """(device, node, all of it), on both of two devices"""
    others = lax.ppermute(nodes, AXIS, [(0, 1), (1, 0)])
    is_first = lax.axis_index(AXIS) == 0
    return jnp.stack([jnp.where(is_first, nodes, others), jnp.where(is_first, others, nodes)])


def unpacked(vectors: dict[str, jax.Array], like: Any) -> Any:
    """The tree of arrays that was packed; `like` has its shapes behind an empty axis."""
    return unflat(vectors, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), like))


def piece(array: jax.Array, device: jax.Device) -> jax.Array:
    """What lies on one device."""
    return next(shard.data for shard in array.addressable_shards if shard.device == device)
