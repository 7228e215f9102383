"""The device state between the calls of a step: weights, optimizer, statistics, running sums."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Set
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from unisono._src.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.replica.protocol import State
from unisono._src.step import running_sums
from unisono._src.step.program import StepBuffers
from unisono._src.typed_jax import device_put
from unisono._src.typing import AnyArray, Array, PyTree, Shape
from unisono._src.xla.interrupts import delay_interrupts
from unisono._src.xla.programs import DeviceProgram

ArrayLayout: TypeAlias = tuple[Shape, str]
"""(shape, dtype)."""


Places: TypeAlias = Set[tuple[int, int]]
"""Arrays of a state, by group and place in it."""


class BufferLayout(NamedTuple):
    """The layout of a step's buffers beside its state: those of batches of another kind may differ."""

    sums: tuple[tuple[tuple[str, ArrayLayout], ...], ...] = ()
    """For each phase, by dtype."""
    kept: tuple[tuple[int, tuple[tuple[ArrayLayout, ...], ...]], ...] = ()
    """For each size of shards and each phase."""

    def make_zeros(self) -> tuple[list[dict[str, np.ndarray]], dict[int, list[list[np.ndarray]]]]:
        """Return (running sums, what shards keep), on the host."""
        sums = [{name: np.zeros(*layout) for name, layout in of_phase} for of_phase in self.sums]
        return sums, {size: [[np.zeros(*layout) for layout in of_phase] for of_phase in phases] for size, phases in self.kept}


class DeviceState:
    """The device state of a placement. The lead has the newest state; other devices get it from there when they next need it."""

    def __init__(self, list_read: Callable[[State], Places], placement: Placement, homes: Collection[int]) -> None:
        """`list_read` returns the arrays of the state that replicas read; `homes` are the devices that finish steps."""
        self._list_read = list_read
        self._placement = placement
        self._homes = homes
        self._states: dict[int, State] = {}
        self._buffers: dict[tuple[int, BufferLayout], PyTree] = {}
        """Running sums and what shards keep, by device and layout."""
        self._layout = BufferLayout()
        self._current: dict[int, Places] = {}
        """For each device the arrays of its state that are the newest, by group and place."""
        self._returned: list[Array] = []
        self._take_program = DeviceProgram(running_sums.get_place)
        self._put_program = DeviceProgram(put_first, donate=(0,))

    def __getitem__(self, index: int) -> StepBuffers:
        key = index, self._layout
        if key not in self._buffers:
            self._buffers[key] = device_put(self._layout.make_zeros(), self._placement.devices[index])
        return StepBuffers(self._states[index], *self._buffers[key])

    def __setitem__(self, index: int, work: StepBuffers) -> None:
        self._states[index] = work.state
        self._buffers[index, self._layout] = tuple(work[1:])

    def set_layout(self, layout: BufferLayout) -> None:
        """Take the layout of the steps that follow."""
        self._layout = layout

    @property
    def current(self) -> set[int]:
        """Return the devices that have the newest state, as far as they read it."""
        return set(self._current)

    @property
    def lead_state(self) -> State:
        """Return the newest state, on the lead."""
        return self._states[0]

    def receive_state(self, state: State) -> bool:
        """Take the state from Keras' loop, which passes back what it was given unless a callback has assigned a variable.

        Return whether the state is another one than the last step has made.
        """
        leaves = list(itertools.chain.from_iterable(state))
        if (
            0 in self._states
            and len(leaves) == len(self._returned)
            and all(a is b for a, b in zip(leaves, self._returned, strict=True))
        ):
            return False
        self._states[0] = bring_state(state, self._placement.lead)
        self._current = {0: list_places(state)}
        return True

    def list_assigned(self, state: State) -> list[tuple[int, Array]] | None:
        """Return, with their numbers, the arrays of a state that have other values than the last step has made; None where these are gone.

        They are for the first state, and after an evaluation, which was given their memory. Metrics are left out: what is logged may differ
        between processes.
        """
        newest = list(itertools.chain.from_iterable(self._states.get(0, ())))
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
        state = self.lead_state
        read = list_places(state) if index in self._homes else self._list_read(state)
        missing = read - self._current.get(index, set())
        if missing or index not in self._states:
            device = self._placement.devices[index]
            sent = device_put({place: state[place[0]][place[1]] for place in missing}, device)
            if index not in self._states:
                idle = [[np.zeros(a.shape, a.dtype) for a in group] for group in state]
                self._states[index] = tuple(device_put(idle, device))
            self._states[index] = tuple(
                [sent.get((group, position), old) for position, old in enumerate(arrays)]
                for group, arrays in enumerate(self._states[index])
            )
            self._current[index] = self._current.get(index, set()) | missing
        return self[index]

    def note_finished(self, homes: Collection[int]) -> None:
        """Note that these devices have finished a step; the state of all other devices is now old."""
        self._current = {index: self._current[index] for index in homes}

    def take_sum(self, index: int, phase: int) -> PackedTree:
        """Return the sum of a phase that a device has finished."""
        return self._take_program(self._placement.devices[index], (phase, self._layout), self[index].sums[phase])

    def sum_shapes(self, phase: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return such a sum, in shapes."""
        return {name: jax.ShapeDtypeStruct(shape[1:], dtype) for name, (shape, dtype) in self._layout.sums[phase]}

    def put_total(self, index: int, phase: int, total: PackedTree) -> None:
        """Put the total of a phase where later calls read it."""
        work = self.on(index)
        with delay_interrupts():
            device = self._placement.devices[index]
            sums = self._put_program(device, (phase, self._layout), work.sums[phase], device_put(total, device))
            self[index] = work._replace(sums=[*work.sums[:phase], sums, *work.sums[phase + 1 :]])

    def give_state(self) -> State:
        """Return the newest state to a loop, and remember its arrays."""
        self._returned = list(itertools.chain.from_iterable(self.lead_state))
        return self.lead_state

    def forget(self) -> None:
        """Drop what lies on the devices."""
        self._states = {}
        self._buffers = {}
        self._current = {}
        self._returned = []


def list_places(state: State) -> Places:
    """Return all arrays of a state."""
    return {(group, place) for group, arrays in enumerate(state) for place in range(len(arrays))}


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


def put_first(sums: running_sums.Sums, value: PackedTree) -> running_sums.Sums:
    return running_sums.set_place(sums, 0, value)
