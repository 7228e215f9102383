"""Sums on the lead of a process. They are for CPU devices, where collectives can starve each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from unisono._src.engine import reduction_tree
from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.exchange.in_program import can_add_in_programs
from unisono._src.engine.exchange.protocol import FinishedSums, SumDescription
from unisono._src.engine.packing import PackedTree
from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.placement import Placement
from unisono._src.programs.private.device_arrays import write_first_rows
from unisono._src.typed_jax import device_put, map_tree


class LeadExchange:
    """An exchange that adds on the lead of one process. It then brings the total to all devices of the process."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._mesh = get_mesh(placement.devices)
        self.adds_in_programs = placement.processes is None and can_add_in_programs(self._mesh)
        self._take_first = DeviceProgram(take_first_places, cut=True)
        self._put_first = DeviceProgram(put_at_first_places, donate=(0,), cut=True)
        self._make_adder = functools.cache(make_adder)

    def total(self, finished: Sequence[FinishedSums], description: SumDescription) -> PackedTree:
        sums: dict[range, PackedTree | None] = {}
        for layer in finished:
            parts = self._bring_to_lead(layer.sums)
            for node, part in zip(layer.nodes, parts, strict=True):
                if node is not None:
                    sums[node[0]] = part if node[1] else None
        return self._spread(self.total_on_lead(sums, description), finished[-1].sums)

    def total_on_lead(self, sums: Mapping[range, PackedTree | None], description: SumDescription) -> PackedTree:
        """Add this process' sums, which lie on the lead.

        The total is over all replicas. None stands for replicas without rows.
        """
        total = self.sum_span(range(description.leaves), sums)
        assert total is not None  # some replica has rows
        return total

    def _bring_to_lead(self, sums: PackedTree) -> list[PackedTree]:
        """Bring the sum of each device to the lead. A CPU reads the memory of all its devices in place."""
        parts: list[PackedTree] = [{} for _ in self._mesh.devices]
        if not self._mesh.shares_memory:
            sums = self._take_first(self._mesh, tuple((name, array.shape) for name, array in sums.items()), sums)
        for name, array in sums.items():
            for part, block in zip(parts, self._mesh.list_blocks(array), strict=True):
                part[name] = np.asarray(block)[0] if self._mesh.shares_memory else block
        return parts if self._mesh.shares_memory else device_put(parts, self._mesh.lead)

    def _spread(self, total: PackedTree, sums: PackedTree) -> PackedTree:
        """Put the total at index 0 of all devices' sums.

        Shared memory is written in place: calls are over, and nobody else reads it.
        """
        if self._mesh.shares_memory:
            for name, array in sums.items():
                write_first_rows(self._mesh.list_blocks(array), np.asarray(total[name]))
            return sums
        shapes = tuple((name, array.shape) for name, array in sums.items())
        return self._put_first(self._mesh, shapes, sums, self._mesh.put_everywhere(total))

    def sum_span(self, span: range, sums: Mapping[range, PackedTree | None]) -> PackedTree | None:
        """Add sums on the lead, over a span of replicas. None if none of these replicas has rows."""
        own = {node: value for node, value in sums.items() if span.start <= node.start and node.stop <= span.stop}
        values = [value for value in own.values() if value is not None]
        if len(values) < 2:
            return values[0] if values else None
        nodes = tuple([(node, value is not None) for node, value in own.items()])
        shapes = tuple([(name, array.shape, array.dtype) for name, array in values[0].items()])
        return self._make_adder(span, nodes)(self._mesh.lead, shapes, values)


def make_adder(span: range, nodes: tuple[tuple[range, bool], ...]) -> DeviceProgram:
    """Make the program that adds the sums of nodes with rows."""

    def add(values: Sequence[PackedTree]) -> PackedTree | None:
        rest = iter(values)
        sums = {node: next(rest) if has_rows else None for node, has_rows in nodes}
        return reduction_tree.sum_tree(span, sums.__contains__, sums.__getitem__, add_vectors)

    return DeviceProgram(add)


def add_vectors(left: PackedTree, right: PackedTree) -> PackedTree:
    """Add two contributions. This is the only arithmetic between replicas."""
    return map_tree(jnp.add, left, right)


def take_first_places(sums: PackedTree) -> PackedTree:
    return map_tree(lambda array: array[0], sums)


def put_at_first_places(sums: PackedTree, total: PackedTree) -> PackedTree:
    return map_tree(lambda array, row: array.at[0].set(row), sums, total)
