"""The device state between the calls of a step: weights, optimizer, statistics, running sums."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from unisono._src.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.replica.protocol import ReplicaComputation, State
from unisono._src.step import running_sums
from unisono._src.step.program import StepBuffers
from unisono._src.typed_jax import device_put, map_tree
from unisono._src.typing import AnyArray, Array
from unisono._src.xla.interrupts import delay_interrupts
from unisono._src.xla.programs import DeviceProgram

EmptySums: TypeAlias = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
"""(contributions, divisors), on the host: for each dtype, zeros of shape (place, element)."""


class DeviceState:
    """The device state of a placement. The lead has the newest state; other devices get it from there when they next need it."""

    def __init__(self, functions: ReplicaComputation, placement: Placement, homes: Collection[int]) -> None:
        """`homes` are the devices that finish steps."""
        self._functions = functions
        self._placement = placement
        self._homes = homes
        self._work: dict[int, StepBuffers] = {}
        self.current: set[int] = set()
        """The devices whose state is the newest one."""
        self._returned: list[Array] = []
        self._take_program = DeviceProgram(running_sums.get_place)
        self._put_program = DeviceProgram(put_first, donate=(0,))

    def __getitem__(self, index: int) -> StepBuffers:
        return self._work[index]

    def __setitem__(self, index: int, work: StepBuffers) -> None:
        self._work[index] = work

    def receive_state(self, state: State, sums: Callable[[], EmptySums]) -> bool:
        """Take the state from Keras' loop, which passes back what it was given unless a callback has assigned a variable.

        `sums` makes empty sums for the first state. Return whether the state is another one than the last step has made.
        """
        leaves = list(itertools.chain.from_iterable(state))
        if (
            0 in self._work
            and len(leaves) == len(self._returned)
            and all(a is b for a, b in zip(leaves, self._returned, strict=True))
        ):
            return False
        state = bring_state(state, self._placement.lead)
        device_sums = self._work[0][1:] if 0 in self._work else device_put(sums(), self._placement.lead)
        self._work[0] = StepBuffers(state, *device_sums)
        self.current = {0}
        return True

    def list_assigned(self, state: State) -> list[tuple[int, Array]] | None:
        """Return, with their numbers, the arrays of a state that have other values than the last step has made; None where these are gone.

        They are for the first state, and after an evaluation, which was given their memory. Metrics are left out: what is logged may differ
        between processes.
        """
        newest = list(itertools.chain.from_iterable(self._work[0].state)) if 0 in self._work else []
        leaves = list(itertools.chain.from_iterable(state))
        compared = range(len(leaves) - len(state[-1]))
        if len(newest) != len(leaves):
            return None
        other = [number for number in compared if leaves[number] is not newest[number]]
        if any(newest[number].is_deleted() for number in other):
            return None
        return [(number, leaves[number]) for number in other if has_other_values(leaves[number], newest[number])]

    def on(self, index: int) -> StepBuffers:
        """Return what a call on this device starts from; send the newest state if it is not there, as far as its replicas read it."""
        if index not in self.current:
            state = self._work[0].state
            source = [list(group) if read else None for group, read in zip(state, self._list_read(index), strict=True)]
            scales = {(group, position): state[group][position] for group, position in self._functions.scales()}
            device = self._placement.devices[index]
            sent_groups, scales = device_put((source, scales), device)
            if index not in self._work:
                idle = [[np.zeros(a.shape, a.dtype) for a in group] for group in state]
                sums = map_tree(lambda a: np.zeros(a.shape, a.dtype), self._work[0][1:])
                self._work[index] = StepBuffers(tuple(device_put(idle, device)), *device_put(sums, device))
            groups = [new if new is not None else old for new, old in zip(sent_groups, self._work[index].state, strict=True)]
            for (group, position), value in scales.items():
                groups[group] = [*groups[group][:position], value, *groups[group][position + 1 :]]
            self._work[index] = self._work[index]._replace(state=tuple(groups))
            self.current.add(index)
        return self._work[index]

    def note_finished(self, homes: Collection[int]) -> None:
        """Note that these devices have finished a step; the state of all other devices is now old."""
        self.current = set(homes)

    def _list_read(self, index: int) -> list[bool]:
        """Return which groups of the state this device reads, beside scales: all groups where it finishes steps."""
        return [index in self._homes or read for read in self._functions.read()]

    def take_sum(self, index: int, counting: bool) -> PackedTree:
        """Return the sum that a device has finished: of divisors, if they were counted, or of contributions."""
        return self._take_program(self._placement.devices[index], counting, self._list_sums(index, counting))

    def sum_shapes(self, counting: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """Return such a sum, in shapes."""
        return {
            name: jax.ShapeDtypeStruct(places.shape[1:], places.dtype) for name, places in self._list_sums(0, counting).items()
        }

    def _list_sums(self, index: int, counting: bool) -> running_sums.Sums:
        return self._work[index].divisors if counting else self._work[index].contributions

    def put_total(self, index: int, total: PackedTree) -> None:
        """Put the total of all contributions where a call that finishes the step reads it."""
        work = self.on(index)
        with delay_interrupts():
            contributions = self._put_program(self._placement.devices[index], None, work.contributions, total)
            self._work[index] = work._replace(contributions=contributions)

    def give_state(self) -> State:
        """Return the newest state to a loop, and remember its arrays."""
        state = self._work[0].state
        self._returned = list(itertools.chain.from_iterable(state))
        return state

    def forget(self) -> None:
        """Drop what lies on the devices."""
        self._work = {}
        self.current = set()
        self._returned = []


def bring_state(state: State, device: jax.Device) -> State:
    """Return the state on a device. What lies there is not sent: for the hundreds of arrays of a large net this takes time."""
    there = SingleDeviceSharding(device)

    def is_away(leaf: AnyArray) -> bool:
        return not (isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding == there)

    leaves, structure = jax.tree.flatten(tuple(map(list, state)))
    numbers = [number for number, leaf in enumerate(leaves) if is_away(leaf)]
    for number, sent in zip(numbers, device_put([leaves[number] for number in numbers], device), strict=True):
        leaves[number] = sent
    return jax.tree.unflatten(structure, leaves)


def has_other_values(one: Array, other: Array) -> bool:
    return np.asarray(one).tobytes() != np.asarray(other).tobytes()


def put_first(contributions: running_sums.Sums, value: PackedTree) -> running_sums.Sums:
    return running_sums.set_place(contributions, 0, value)
