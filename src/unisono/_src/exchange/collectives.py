"""Sums by one jitted program of collectives: for devices with links of their own.

Every device gets a slice of all nodes (all-to-all), adds them in the order of the reduction tree, and sends its slice of the total to
the other devices (all-gather). Two devices with one node each send their whole node to each other instead: there are as many bytes,
and one exchange less. No library's all-reduce: the order of its additions is not ours to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono._src import reduction_tree, typed_jax
from unisono._src.exchange.protocol import AddFunction, DeviceSums, SumDescription
from unisono._src.packing import PackedTree, pack_tree, unpack_tree
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.typing import Array, PyTree
from unisono._src.xla.determinism import get_compiler_options
from unisono._src.xla.programs import DeviceProgram

Schedule: TypeAlias = tuple[tuple[tuple[int, int, bool], ...], ...]
"""For each device, its nodes: (first replica, last replica + 1, whether there were rows)."""

CollectiveProgram: TypeAlias = Callable[[PackedTree, Array | None], tuple[PackedTree, Array | None]]
"""Of the vectors and the words that the devices send, it makes the total and all words, on each device."""

AXIS = "devices"

BLOCK = 1_250_000
"""On CPU long vectors are summed in blocks of about this number of elements: what was received is added while it is in the cache."""


class CollectiveExchange:
    """An exchange whose devices are all homes: each has the whole total."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.homes = tuple(range(len(placement.devices)))
        self._collective_sum = CollectiveSum(placement.devices, placement.devices)

    def total(
        self, nodes: Sequence[DeviceSums], add: AddFunction, leaves: int, description: SumDescription | None = None
    ) -> list[PyTree]:
        schedule = tuple(tuple((span.start, span.stop, value is not None) for span, value in sums.items()) for sums in nodes)
        example = next(value for sums in nodes for value in sums.values() if value is not None)
        shapes = typed_jax.map_tree(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), example)
        return self._collective_sum.total([list(sums.values()) for sums in nodes], schedule, leaves, shapes)[0]


class CollectiveSum:
    """A sum over devices by collectives; of several processes, each sends and receives for its own devices."""

    def __init__(self, devices: Sequence[jax.Device], own: Sequence[jax.Device]) -> None:
        self._devices = tuple(devices)
        self._own_devices = tuple(own)
        self._mesh = Mesh(np.array(self._devices), (AXIS,))
        self._pack = DeviceProgram(self._pack_nodes)
        self._unpack = DeviceProgram(unpack_total)
        self._programs: dict[Hashable, CollectiveProgram] = {}

    def total(
        self,
        nodes: Sequence[Sequence[PyTree | None]],
        schedule: Schedule,
        leaves: int,
        shapes: PyTree,
        words: tuple[int, ...] = (),
    ) -> tuple[list[PyTree], np.ndarray]:
        """Return (the total on each of our own devices, the words of all devices).

        Args:
            nodes: The sums of each of our own devices, in the order of the schedule; None for replicas without rows.
            schedule: The nodes of all devices.
            leaves: The number of leaves of the reduction tree.
            shapes: A contribution, in shapes.
            words: Whole numbers that each of our devices sends to the others.
        """
        shapes_and_dtypes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes))
        key = leaves, schedule, jax.tree.structure(shapes), shapes_and_dtypes, len(words)
        slots = max(map(len, schedule))
        packed = [
            self._pack_on(device, key, slots, device_nodes, shapes)
            for device, device_nodes in zip(self._own_devices, nodes, strict=True)
        ]
        if key not in self._programs:
            options = get_compiler_options(self._own_devices[0].platform)
            self._programs[key] = typed_jax.jit(partial(self._sum_arrays, leaves, schedule), compiler_options=options)
        sums, received = self._run_program(self._programs[key], packed, words)
        empty = typed_jax.map_tree(lambda leaf: np.empty((0, *leaf.shape), leaf.dtype), shapes)
        totals = [
            self._unpack(device, key, {name: find_device_data(array, device) for name, array in sums.items()}, empty)
            for device in self._own_devices
        ]
        none = np.zeros((0, 0), np.int32)
        return totals, none if received is None else np.asarray(find_device_data(received, self._own_devices[0]))

    def _run_program(
        self, program: CollectiveProgram, packed: Sequence[PackedTree], words: tuple[int, ...]
    ) -> tuple[PackedTree, Array | None]:
        """Run a program on what our own devices send: their vectors and the words. On CPU, wait for it."""
        arrays = {name: self._global([vectors[name] for vectors in packed]) for name in packed[0]}
        rows = [typed_jax.device_put(np.array([words], np.int32), device) for device in self._own_devices] if words else []
        sent = self._global(rows) if rows else None
        wait_on_cpu: typed_jax.Identity = (
            typed_jax.block_until_ready if self._own_devices[0].platform == "cpu" else lambda arrays: arrays
        )
        # On CPU nothing else may be in flight: there collectives starve each other, and share their threads with the replicas.
        with get_activity().report_busy("computing"):
            arrays = wait_on_cpu(arrays)
        with get_activity().report_waiting("for a sum"):
            return wait_on_cpu(program(arrays, sent))

    def _pack_on(
        self, device: jax.Device, key: Hashable, slots: int, nodes: Sequence[PyTree | None], shapes: PyTree
    ) -> PackedTree:
        """Pack the nodes of a device, with zeros for those without rows and in free slots."""
        zeros = typed_jax.map_tree(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        values = [zeros if value is None else value for value in nodes]
        return self._pack(device, (key, len(values)), values + [zeros] * (slots - len(values)))

    def _pack_nodes(self, nodes: list[PyTree]) -> PackedTree:
        """Return an array (1, node, block, element) for each dtype, in blocks whose width is a multiple of the number of devices."""
        flats = [pack_tree(node) for node in nodes]
        return {name: self._split_blocks(jnp.stack([vectors[name] for vectors in flats]))[None] for name in flats[0]}

    def _split_blocks(self, nodes: Array) -> Array:
        count, width = nodes.shape
        blocks = max(1, round(width / BLOCK)) if self._own_devices[0].platform == "cpu" else 1
        return typed_jax.pad(nodes, ((0, 0), (0, -width % (blocks * len(self._devices))))).reshape(count, blocks, -1)

    def _global(self, arrays: list[Array]) -> Array:
        """Return an array over all devices, of which ours hold `arrays`."""
        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        return jax.make_array_from_single_device_arrays((len(self._devices), *arrays[0].shape[1:]), sharding, arrays)

    def _sum_arrays(
        self, leaves: int, schedule: Schedule, arrays: PackedTree, words: Array | None
    ) -> tuple[PackedTree, Array | None]:
        sharded = PartitionSpec(AXIS)
        replicated = PartitionSpec()

        def run_on_device(arrays: PackedTree, words: Array | None) -> tuple[PackedTree, Array | None]:
            received = typed_jax.map_tree(lambda own: typed_jax.all_gather(own[0], AXIS), words)
            return typed_jax.map_tree(partial(self._sum_nodes, leaves, schedule), arrays), received

        run = jax.shard_map(run_on_device, mesh=self._mesh, in_specs=sharded, out_specs=replicated, check_vma=False)
        return run(arrays, words)

    def _sum_nodes(self, leaves: int, schedule: Schedule, own_nodes: Array) -> Array:
        """Return the sum of the nodes of all devices, of which `own_nodes` (1, node, block, element) lie on this device."""
        _, nodes, blocks, _ = own_nodes.shape
        in_pairs = len(schedule) == 2 and nodes == 1

        def sum_of_block(number: int | Array) -> Array:
            block = typed_jax.take_index(own_nodes[0], number, axis=1, keepdims=False)
            pieces = swap_nodes(block) if in_pairs else deal_out_nodes(block, len(schedule))
            total = self._sum_slices(leaves, schedule, pieces)
            return total if in_pairs else typed_jax.all_gather(total, AXIS, tiled=True)

        return sum_of_block(0) if blocks == 1 else typed_jax.map_rows(sum_of_block, jnp.arange(blocks)).reshape(-1)

    def _sum_slices(self, leaves: int, schedule: Schedule, pieces: Array) -> Array:
        sums = {
            range(start, stop): pieces[device, slot] if has_rows else None
            for device, nodes in enumerate(schedule)
            for slot, (start, stop, has_rows) in enumerate(nodes)
        }
        return cast(
            Array, reduction_tree.sum_tree(range(leaves), sums.__contains__, sums.__getitem__, jnp.add)
        )  # some replica has rows


def deal_out_nodes(nodes: Array, devices: int) -> Array:
    """Return this device's slice of the nodes of all devices: (device, node, element)."""
    slices = nodes.reshape(len(nodes), devices, -1)
    return typed_jax.all_to_all(slices, AXIS, split_axis=1, concat_axis=0)


def swap_nodes(nodes: Array) -> Array:
    """Return the whole nodes of both of two devices: (device, node, element)."""
    others = typed_jax.ppermute(nodes, AXIS, [(0, 1), (1, 0)])
    is_first = lax.axis_index(AXIS) == 0
    return jnp.stack([jnp.where(is_first, nodes, others), jnp.where(is_first, others, nodes)])


def unpack_total(vectors: PackedTree, like: PyTree) -> PyTree:
    """Return the tree of arrays that was packed; `like` has its shapes behind an empty axis."""
    return unpack_tree(vectors, typed_jax.map_tree(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), like))


def find_device_data(array: Array, device: jax.Device) -> Array:
    """Return the data of an array that lies on one device."""
    return next(shard.data for shard in array.addressable_shards if shard.device == device)
