"""A replica that is run by itself, beside its device's sums. Its contribution is added to these sums afterwards."""

from __future__ import annotations

import itertools

import jax
import numpy as np

from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.observers.verification import Attempt
from unisono._src.engine.packing import PackedTree
from unisono._src.engine.step import running_sums, step_digests
from unisono._src.engine.step.device_state import make_blocks
from unisono._src.engine.step.observer import WatchedPhase
from unisono._src.engine.step.plan import ReplicaRun
from unisono._src.engine.step.program import CallResult
from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.kernels.rules import rewrite_function
from unisono._src.placement import Placement
from unisono._src.typed_jax import fori_loop, map_tree, optimization_barrier
from unisono._src.typing import Array


class LoneReplicas:
    """The contributions of single replicas, on the devices of a placement."""

    def __init__(self, placement: Placement) -> None:
        self._mesh = get_mesh(placement.devices)
        self._spare_sums: dict[int, running_sums.Sums] = {}
        """Room for a contribution by itself, by phase."""
        self._take_program = DeviceProgram(running_sums.get_place)
        self._add_program = DeviceProgram(add_one, donate=(0,), cut=True)
        self._digest_program = DeviceProgram(rewrite_function(digest_contribution, placement.lead.platform))

    def run(self, index: int, phase: WatchedPhase, replica: int) -> tuple[Attempt, CallResult]:
        """Run one replica in a phase, into sums of its own.

        The result is (its contribution, the result of its call). The sums of all devices stay as they are.
        """
        state, number = phase.device_state, phase.number
        sums = state.work.sums[number]
        like = state.describe_sums(number)
        spare = self._spare_sums.pop(number, None)
        if spare is None or map_tree(lambda a: a.shape[1:], spare) != map_tree(lambda a: a.shape, like):
            block = map_tree(lambda a: np.zeros((a.shape[0] // self._mesh.size, *a.shape[1:]), a.dtype), sums)
            spare = make_blocks(block, self._mesh)
        state.put_sums(number, spare)
        done = phase.call_alone(replica, index)
        spare = self._spare_sums[number] = state.work.sums[number]
        state.put_sums(number, sums)
        contribution = self._take_contribution(index, spare)
        return Attempt(index, contribution, self._digest(index, contribution)), done

    def _take_contribution(self, index: int, sums: running_sums.Sums) -> PackedTree:
        own = {name: self._mesh.list_blocks(array)[index] for name, array in sums.items()}
        return self._take_program(self._mesh.devices[index], describe_key(own), own)

    def _digest(self, index: int, contribution: PackedTree) -> tuple[int, ...]:
        """Digest a contribution on a device, and wait for it."""
        digests = self._digest_program(self._mesh.devices[index], describe_key(contribution), contribution)
        lanes: list[list[int]] = jax.device_get(digests).tolist()
        return tuple(itertools.chain.from_iterable(lanes))

    def add_contribution(self, index: int, phase: WatchedPhase, run: ReplicaRun, contribution: PackedTree, is_last: bool) -> None:
        """Add the contribution of one replica to a device's sums. The sums are completed if it is the last one."""
        complete = run.before + run.count if is_last else 0
        orders = [np.array([[run.before, complete, int(device == index)]], np.int32) for device in range(self._mesh.size)]
        sent = self._mesh.put_everywhere(map_tree(np.asarray, contribution))  # the right one may be another device's
        sums = phase.device_state.work.sums[phase.number]
        added = self._add_program(self._mesh, describe_key(contribution), sums, self._mesh.put_blocks(orders), sent)
        phase.device_state.put_sums(phase.number, added)

    def forget(self) -> None:
        """Drop what lies on the devices."""
        self._spare_sums = {}


def add_one(sums: running_sums.Sums, orders: Array, contribution: PackedTree) -> running_sums.Sums:
    """Add a contribution after others, on one device. The orders are (before, complete, whether this device adds it)."""
    before, complete, is_here = orders[0]

    def push(_: Array, sums: running_sums.Sums) -> running_sums.Sums:
        return running_sums.fold_sums(running_sums.push_value(sums, before, contribution), complete)

    return fori_loop(0, is_here, push, optimization_barrier(sums))


def describe_key(tree: PackedTree) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(sorted((name, vector.shape) for name, vector in tree.items()))


def digest_contribution(contribution: PackedTree) -> Array:
    """Compute the digests (dtype, lane) of a contribution."""
    return step_digests.digest_arrays([vector for _, vector in sorted(contribution.items())])
