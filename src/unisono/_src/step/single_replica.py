"""A replica that is run by itself, beside the sums of its device, and whose contribution is added to them afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import numpy as np

from unisono._src.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.step import running_sums, step_digests
from unisono._src.step.device_state import DeviceState
from unisono._src.step.plan import ReplicaRun
from unisono._src.step.program import CallResult
from unisono._src.step.verification import Attempt
from unisono._src.typed_jax import device_put, map_tree
from unisono._src.typing import Array
from unisono._src.xla.programs import DeviceProgram
from unisono._src.xla.rewrite import rewrite_function


class SingleReplicas:
    """The contributions of single replicas, on the devices of a placement."""

    def __init__(self, placement: Placement, device_state: DeviceState) -> None:
        self._devices = placement.devices
        self._device_state = device_state
        self._spare_sums: dict[tuple[int, int], running_sums.Sums] = {}
        """Room for a contribution by itself, by device and phase."""
        self._push_program = DeviceProgram(running_sums.push_value, donate=(0,))
        self._fold_program = DeviceProgram(running_sums.fold_sums, donate=(0,))
        self._digest_program = DeviceProgram(rewrite_function(digest_contribution, placement.lead.platform))

    def run(self, index: int, phase: int, call: Callable[[], CallResult]) -> tuple[Attempt, CallResult]:
        """Return (the contribution of one replica to a phase, the result of its call). The sums of the device stay as they are.

        `call` runs the replica on the device, and has its contribution as the only one in the sums.
        """
        work = self._device_state.on(index)
        sums, like = work.sums[phase], self._device_state.sum_shapes(phase)
        spare = self._spare_sums.pop((index, phase), None)
        if spare is None or map_tree(lambda a: a.shape[1:], spare) != map_tree(lambda a: a.shape, like):
            spare = device_put(map_tree(lambda a: np.zeros(a.shape, a.dtype), sums), self._devices[index])
        self._set_sums(index, phase, spare)
        done = call()
        contribution = self._take_contribution(index, phase)
        self._spare_sums[index, phase] = self._device_state[index].sums[phase]
        self._set_sums(index, phase, sums)
        return Attempt(index, contribution, self._digest(index, contribution)), done

    def _set_sums(self, index: int, phase: int, sums: running_sums.Sums) -> None:
        work = self._device_state[index]
        self._device_state[index] = work._replace(sums=[*work.sums[:phase], sums, *work.sums[phase + 1 :]])

    def _take_contribution(self, index: int, phase: int) -> PackedTree:
        return self._device_state.take_sum(index, phase)

    def _digest(self, index: int, contribution: PackedTree) -> tuple[int, ...]:
        """Return the digest of a contribution on a device, which is waited for."""
        lanes: list[list[int]] = jax.device_get(
            self._digest_program(self._devices[index], tuple(sorted((n, v.shape) for n, v in contribution.items())), contribution)
        ).tolist()
        return tuple(itertools.chain.from_iterable(lanes))

    def add_contribution(self, index: int, phase: int, run: ReplicaRun, contribution: PackedTree, is_last: bool) -> None:
        """Add the contribution of a run of one replica to the sums of a device, and complete the sums if it is the last one."""
        device = self._devices[index]
        key = tuple(sorted((name, vector.shape) for name, vector in contribution.items()))
        contribution = device_put(contribution, device)  # the right one may be another device's
        sums = self._push_program(device, key, self._device_state[index].sums[phase], np.int32(run.before), contribution)
        if is_last:
            sums = self._fold_program(device, key, sums, np.int32(run.before + run.count))
        self._set_sums(index, phase, sums)

    def forget(self) -> None:
        """Drop what lies on the devices."""
        self._spare_sums = {}


def digest_contribution(contribution: PackedTree) -> Array:
    """Return the digests (dtype, lane) of a contribution."""
    return step_digests.digest_arrays([vector for _, vector in sorted(contribution.items())])
