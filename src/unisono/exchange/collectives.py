"""Sums by one jitted program of collectives: for devices with links of their own.

Every device gets a piece of all nodes (all-to-all), adds them in the order of the tree, and hands its piece of the total to
the others (all-gather). No library's all-reduce: the order of its additions is not ours to choose.
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

from unisono import tree
from unisono.cluster.watch.progress import current
from unisono.exchange.base import Add, Elsewhere
from unisono.flat import flat, unflat
from unisono.placement import Placement
from unisono.xla.programs import Program

Schedule = tuple[tuple[tuple[int, int, bool], ...], ...]
"""For each device, its nodes: (first replica, last replica + 1, whether there were rows)."""


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
        self._mesh = Mesh(np.array(self._devices), ("devices",))
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
            self._programs[key] = jax.jit(partial(self._summed, leaves, schedule))
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
        """Nodes as rows of one matrix for each dtype, of a width that the devices can share out."""
        flats = [flat(node) for node in nodes]
        devices = len(self._devices)
        matrices = {name: jnp.stack([flat[name] for flat in flats]) for name in flats[0]}
        return {name: jnp.pad(m, ((0, 0), (0, -m.shape[1] % devices)))[None] for name, m in matrices.items()}

    def _global(self, parts: list[jax.Array]) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec("devices"))
        return jax.make_array_from_single_device_arrays((len(self._devices), *parts[0].shape[1:]), sharding, parts)

    def _summed(
        self, leaves: int, schedule: Schedule, arrays: dict[str, jax.Array], told: Any
    ) -> tuple[dict[str, jax.Array], Any]:
        here, nowhere = PartitionSpec("devices"), PartitionSpec()

        def on_device(arrays: dict[str, jax.Array], told: Any) -> tuple[dict[str, jax.Array], Any]:
            heard = jax.tree.map(lambda words: lax.all_gather(words[0], "devices"), told)
            return jax.tree.map(partial(self._sum_of, leaves, schedule), arrays), heard

        run = jax.shard_map(on_device, mesh=self._mesh, in_specs=here, out_specs=nowhere, check_vma=False)
        return run(arrays, told)

    def _sum_of(self, leaves: int, schedule: Schedule, mine: jax.Array) -> jax.Array:
        devices = len(self._devices)
        pieces = mine[0].reshape(mine.shape[1], devices, -1)
        pieces = lax.all_to_all(pieces, "devices", split_axis=1, concat_axis=0)  # (device, node, my piece of it)
        known = {
            range(start, stop): pieces[device, slot] if there else None
            for device, nodes in enumerate(schedule)
            for slot, (start, stop, there) in enumerate(nodes)
        }
        total = tree.total(range(leaves), known.__contains__, known.__getitem__, jnp.add)
        return lax.all_gather(total, "devices", tiled=True)


def unpacked(vectors: dict[str, jax.Array], like: Any) -> Any:
    """The tree of arrays that was packed; `like` has its shapes behind an empty axis."""
    return unflat(vectors, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), like))


def piece(array: jax.Array, device: jax.Device) -> jax.Array:
    """What lies on one device."""
    return next(shard.data for shard in array.addressable_shards if shard.device == device)
