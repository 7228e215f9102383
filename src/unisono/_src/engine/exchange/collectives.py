"""Sums by one program of collectives.

It is for devices with links of their own, and between processes.

Every device gets a slice of all nodes (all-to-all), adds them in the order of the reduction tree, and sends its slice of the total to
the other devices (all-gather). Two devices with one node each send their whole node to each other instead: there are as many bytes,
and one exchange less. No library's all-reduce: the order of its additions is not ours to choose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono._src import typed_jax
from unisono._src.engine import reduction_tree
from unisono._src.engine.device_mesh import AXIS, DeviceMesh, get_mesh
from unisono._src.engine.exchange.protocol import FinishedSums, Node, SumDescription
from unisono._src.engine.packing import PackedTree
from unisono._src.engine.xla.determinism import get_compiler_options
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.typing import Array

Schedule: TypeAlias = tuple[tuple[Node, ...], ...]
"""The nodes of each device."""

SumProgram: TypeAlias = Callable[[Sequence[PackedTree], Array], tuple[PackedTree, Array]]
"""Takes the devices' nodes, and the words that they send along. Makes the total and all words, on each device."""

BLOCK = 1_250_000
"""On CPU long vectors are summed in blocks of about this number of elements. What was received is then added while it is in the cache."""


class CollectiveExchange:
    """An exchange between linked devices of one process."""

    adds_in_programs = False

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._mesh = get_mesh(placement.devices)
        self._make_program = functools.cache(functools.partial(make_total_program, self._mesh))

    def total(self, finished: Sequence[FinishedSums], description: SumDescription) -> PackedTree:
        by_device = zip(*(layer.nodes for layer in finished), strict=True)
        schedule = tuple(tuple(node or NO_NODE for node in nodes) for nodes in by_device)
        *before, last = [layer.sums for layer in finished]
        return self._make_program(description.leaves, schedule)(before, last)


NO_NODE: Node = range(0), False


class ProcessSum:
    """A sum over one device of each process."""

    def __init__(self, leads: Sequence[jax.Device], own: jax.Device) -> None:
        self._count = len(leads)
        self._own = own
        mesh = Mesh(np.array(leads), (AXIS,))
        self._by_process = NamedSharding(mesh, PartitionSpec(AXIS))
        self._make_program = functools.cache(functools.partial(make_sum_program, mesh))

    def total(
        self, nodes: Sequence[PackedTree | None], description: SumDescription, words: tuple[int, ...]
    ) -> tuple[PackedTree, np.ndarray]:
        """Add nodes over all processes, and exchange words.

        The result is (the total on our own device, the words of all processes).

        Args:
            nodes: Our sums, in the order of the description; None for replicas without rows.
            description: The sum.
            words: Whole numbers that we send to the others.
        """
        slots = max(map(len, description.nodes))
        filled = [*nodes, *[None] * (slots - len(nodes))]
        own = [make_empty_node(description.like) if node is None else node for node in filled]
        sent, sent_words = typed_jax.device_put((own, np.array([words], np.int32)), self._own)
        program = self._make_program(description.leaves, description.nodes)
        everything = typed_jax.map_tree(self._join, (sent, sent_words))
        on_cpu = self._own.platform == "cpu"
        # On CPU nothing else may be in flight: there collectives starve each other, and share their threads with the replicas.
        with get_activity().report_busy("computing"):
            everything = typed_jax.block_until_ready(everything) if on_cpu else everything
        with get_activity().report_waiting("for a sum"):
            result = program(*everything)
            total, received = typed_jax.block_until_ready(result) if on_cpu else result
        return typed_jax.map_tree(find_own_data, total), np.asarray(find_own_data(received))

    def _join(self, array: Array) -> Array:
        """Join our `array` with those of the other processes. Nothing is sent."""
        shape = self._count * array.shape[0], *array.shape[1:]
        return jax.make_array_from_single_device_arrays(shape, self._by_process, [array])


def make_empty_node(like: dict[str, jax.ShapeDtypeStruct]) -> PackedTree:
    return typed_jax.map_tree(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)


def find_own_data(array: Array) -> Array:
    """Take the part of an array that lies on our device. The array lies over all processes."""
    return array.addressable_data(0)


def make_total_program(
    mesh: DeviceMesh, leaves: int, schedule: Schedule
) -> Callable[[Sequence[PackedTree], PackedTree], PackedTree]:
    """Make the program that sums nodes of one process' devices.

    It reads index 0 of each array, and puts the total there in the last array.
    """
    platform = mesh.lead.platform

    def run_on_device(before: Sequence[PackedTree], last: PackedTree) -> PackedTree:
        def put_total(name: str) -> Array:
            own = [sums[name][0] for sums in (*before, last)]
            return last[name].at[0].set(sum_nodes(leaves, schedule, own, platform)[0])

        return {name: put_total(name) for name in last}

    run = mesh.map_blocks(run_on_device, cut=True, cut_results=True)
    return typed_jax.jit(run, donate_argnums=(1,), compiler_options=get_compiler_options(platform))


def make_sum_program(mesh: Mesh, leaves: int, schedule: Schedule) -> SumProgram:
    """Make the program that sums nodes of several processes.

    The words travel with the nodes of one dtype, since each message takes its time.
    """
    platform: str = mesh.devices[0].platform

    def run_on_device(nodes: Sequence[PackedTree], words: Array) -> tuple[PackedTree, Array]:
        totals: PackedTree = {}
        received = None
        for name in nodes[0]:
            own = [node[name] for node in nodes]
            totals[name], told = sum_nodes(leaves, schedule, own, platform, words[0] if received is None else NO_WORDS)
            received = told if received is None else received
        return totals, typed_jax.all_gather(words[0], AXIS) if received is None else received

    run = jax.shard_map(run_on_device, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(), check_vma=False)
    return typed_jax.jit(run, compiler_options=get_compiler_options(platform))


NO_WORDS = np.zeros(0, np.int32)


def sum_nodes(
    leaves: int, schedule: Schedule, own: Sequence[Array], platform: str, words: Array | np.ndarray = NO_WORDS
) -> tuple[Array, Array]:
    """Sum the nodes of all devices; `own` are this device's. The result is (the sum, the words of all devices)."""
    (width,) = own[0].shape
    dtype = own[0].dtype
    blocks = max(1, round(width / BLOCK)) if platform == "cpu" else 1
    padded = typed_jax.pad(jnp.stack(own), ((0, 0), (0, -width % (blocks * len(schedule)))))
    nodes = padded.reshape(len(own), blocks, -1)
    in_pairs = len(schedule) == 2 and len(own) == 1
    parts = 1 if in_pairs else len(schedule)
    bits = view_bits(words, dtype)
    sent = jnp.broadcast_to(bits, (len(own), parts, len(bits)))  # each slice carries the words, since it goes to one device alone

    def sum_of_block(number: int | Array) -> tuple[Array, Array]:
        block = typed_jax.take_index(nodes, number, axis=1, keepdims=False).reshape(len(own), parts, -1)
        with_words = jnp.concatenate([lax.bitcast_convert_type(block, bits.dtype), sent], axis=2)
        pieces = swap_nodes(with_words[:, 0]) if in_pairs else deal_out_nodes(with_words)
        count = block.shape[2]
        total = sum_slices(leaves, schedule, lax.bitcast_convert_type(pieces[..., :count], dtype))
        return total if in_pairs else typed_jax.all_gather(total, AXIS, tiled=True), pieces[:, 0, count:]

    if blocks == 1:
        total, received = sum_of_block(0)
    else:
        totals, received_with_each = typed_jax.map_rows(sum_of_block, jnp.arange(blocks))
        total = totals.reshape(-1)
        received = received_with_each[0]
    return total[:width], read_bits(received, len(words))


def view_bits(words: Array | np.ndarray, dtype: np.dtype) -> Array:
    """View whole numbers as unsigned numbers of a dtype's size. These travel unchanged, whatever a device does with NaN."""
    whole = jnp.asarray(words).astype("int64" if dtype.itemsize == 8 else "int32")
    return lax.bitcast_convert_type(whole, f"uint{8 * dtype.itemsize}").reshape(-1)


def read_bits(received: Array, count: int) -> Array:
    """Read back the whole numbers that `view_bits` has packed. There is a row for each device."""
    size = received.dtype.itemsize
    parts = received.reshape(len(received), count, -1) if size < 4 else received
    return lax.bitcast_convert_type(parts, "int64" if size == 8 else "int32").astype("int32")


def sum_slices(leaves: int, schedule: Schedule, pieces: Array) -> Array:
    sums = {
        span: pieces[device, slot] if has_rows else None
        for device, nodes in enumerate(schedule)
        for slot, (span, has_rows) in enumerate(nodes)
        if span
    }
    total = reduction_tree.sum_tree(range(leaves), sums.__contains__, sums.__getitem__, jnp.add)
    return cast(Array, total)  # some replica has rows


def deal_out_nodes(nodes: Array) -> Array:
    """Exchange nodes (node, slice, element) by slices (all-to-all).

    This device gets its slice of all devices' nodes: (device, node, element).
    """
    return typed_jax.all_to_all(nodes, AXIS, split_axis=1, concat_axis=0)


def swap_nodes(nodes: Array) -> Array:
    """Swap the nodes of two devices: (device, node, element)."""
    others = typed_jax.ppermute(nodes, AXIS, [(0, 1), (1, 0)])
    is_first = lax.axis_index(AXIS) == 0
    return jnp.stack([jnp.where(is_first, nodes, others), jnp.where(is_first, others, nodes)])
