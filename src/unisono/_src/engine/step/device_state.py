"""The device state between the calls of a step.

It holds weights, optimizer, statistics and running sums, on all devices of the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from unisono._src.engine.cut_arrays import CutArrays, lies_cut
from unisono._src.engine.device_mesh import DeviceMesh, get_mesh
from unisono._src.engine.state import State
from unisono._src.engine.step import running_sums
from unisono._src.engine.step.program import StepBuffers
from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.placement import Placement
from unisono._src.typed_jax import device_put, map_tree
from unisono._src.typing import Array, PyTree, Shape

ArrayLayout: TypeAlias = tuple[Shape, str]
"""(shape, dtype)."""


class BufferLayout(NamedTuple):
    """The shapes of a step's buffers beside its state, on a device. Batches of another kind may have another layout."""

    sums: tuple[tuple[tuple[str, ArrayLayout], ...], ...] = ()
    """For each phase, by dtype."""
    kept: tuple[tuple[int, tuple[tuple[ArrayLayout, ...], ...]], ...] = ()
    """For each size of shards and each phase."""

    def describe(self, mesh: DeviceMesh) -> tuple[PyTree, PyTree]:
        """Describe running sums and kept values on a mesh, in shapes."""
        sums = [{name: mesh.describe_blocks(*layout) for name, layout in of_phase} for of_phase in self.sums]
        return sums, {size: [[mesh.describe_blocks(*layout) for layout in each] for each in phases] for size, phases in self.kept}

    def make_zeros(self) -> tuple[list[dict[str, np.ndarray]], dict[int, list[list[np.ndarray]]]]:
        """Make zeros for the running sums and for kept values. They are on the host."""
        sums = [{name: np.zeros(*layout) for name, layout in of_phase} for of_phase in self.sums]
        return sums, {size: [[np.zeros(*layout) for layout in of_phase] for of_phase in phases] for size, phases in self.kept}


class DeviceState:
    """The device state of a placement. All devices have the newest state: each finishes every step."""

    def __init__(self, placement: Placement) -> None:
        self._mesh = get_mesh(placement.devices)
        self._state: State = ()
        self._cut = CutArrays(self._mesh)
        """Weights that lie cut over the devices. Programs get their numbers, and leave them as they are."""
        self._buffers: dict[BufferLayout, PyTree] = {}
        """Running sums and what shards keep, by layout."""
        self._layout = BufferLayout()
        self._take_program = DeviceProgram(copy_first_places, cut=True)
        self._lent: State = ()
        """The newest state as it was handed out, on the lead; empty while it is not."""

    @property
    def work(self) -> StepBuffers:
        """The buffers that the next call starts from."""
        if self._layout not in self._buffers:
            self._buffers[self._layout] = make_blocks(self._layout.make_zeros(), self._mesh)
        return StepBuffers(self._state, *self._buffers[self._layout])

    @work.setter
    def work(self, work: StepBuffers) -> None:
        self._state = work.state
        self._buffers[self._layout] = tuple(work[1:])
        if self._cut.places:
            self._cut.note_call(flatten_state(work.state)[min(self._cut.places)])
        # The call was donated the old state, and so the arrays that were handed out: they share its memory.
        self._lent = ()

    def set_layout(self, layout: BufferLayout) -> None:
        """Take the layout of the steps that follow."""
        self._layout = layout

    @property
    def shapes(self) -> State:
        """The newest state, read for its shapes and dtypes alone."""
        return self._replace_stand_ins(self._state)

    @property
    def program_state(self) -> State:
        """The newest state as programs have it, with what stands for arrays that lie cut."""
        return self._state

    @property
    def cut_places(self) -> frozenset[int]:
        """The places of the arrays that lie cut over the devices."""
        return self._cut.places

    @property
    def lead_program_state(self) -> State:
        """The newest state as programs have it, on the lead."""
        return group_arrays(self._mesh.on_lead(flatten_state(self._state)), self._state)

    @property
    def lead_state(self) -> State:
        """The newest state, all of it on the lead."""
        return self._replace_stand_ins(self.lead_program_state, lambda array: device_put(np.asarray(array), self._mesh.lead))

    def _replace_stand_ins(self, state: State, read: Callable[[Array], Array] = lambda array: array) -> State:
        """Replace what stands for arrays that lie cut by the arrays, as `read` returns them."""
        if not self._cut.places:
            return state
        leaves = flatten_state(state)
        for place in self._cut.places:
            leaves[place] = read(self._cut[place])
        return group_arrays(leaves, state)

    def receive_state(self, state: State, list_unchanged: Callable[[], set[int]]) -> bool:
        """Take the state from Keras' loop. Say whether it differs from the last step's.

        The loop passes back what it was given, unless a callback has assigned a variable. Arrays that lie cut over the devices stay so
        if they are among those that steps leave unchanged.
        """
        leaves = flatten_state(state)
        newest = self._list_newest(state)
        places = [number for number, array in enumerate(newest) if array is None]
        if self._state and not places:
            return False
        cut = [number for number in places if lies_cut(leaves[number], self._mesh)]
        stays = list_unchanged().intersection(cut) if cut else set[int]()
        self._cut.drop([number for number in places if number not in stays])
        sent = {number: self._cut.keep(number, leaves[number]) for number in stays}
        # Through the host: JAX would put an array together by a collective, for which CPU devices may lack threads.
        sent |= {number: np.asarray(leaves[number]) for number in cut if number not in stays}
        away = [number for number in places if number in sent or not self._mesh.is_everywhere(leaves[number])]
        # What lies there is not sent: this takes time.
        on_mesh = self._mesh.put_everywhere([sent.get(number, leaves[number]) for number in away])
        arrays = [leaf if array is None else array for leaf, array in zip(leaves, newest, strict=True)]
        for number, array in zip(away, on_mesh, strict=True):
            arrays[number] = array
        self._state = group_arrays(arrays, state)
        self._lent = ()
        return True

    def _list_newest(self, state: State) -> list[Array | None]:
        """List the last step's arrays for those that were handed out. An array that was not handed out has None."""
        leaves, lent, newest = map(flatten_state, (state, self._lent, self._state))
        if not len(leaves) == len(newest) == len(lent):
            return [None] * len(leaves)
        return [made if leaf is given else None for leaf, given, made in zip(leaves, lent, newest, strict=True)]

    def list_assigned(self, state: State) -> list[tuple[int, Array]] | None:
        """List the numbered arrays that were assigned since the last step.

        These have other values than the last step made. It is None if the last step's arrays are gone: before the first step, and
        after an evaluation, which was given their memory. Metrics are left out: what is logged may differ between processes.
        """
        leaves, newest = map(flatten_state, (state, self.shapes))
        if len(newest) != len(leaves):
            return None
        made = self._list_newest(state)
        other = [number for number in range(len(leaves) - len(state[-1])) if made[number] is None]
        if any(newest[number].is_deleted() for number in other):
            return None
        return [(number, leaves[number]) for number in other if has_other_values(leaves[number], newest[number])]

    def put_sums(self, phase: int, sums: running_sums.Sums) -> None:
        """Replace the sums of a phase."""
        work = self.work
        self.work = work._replace(sums=[*work.sums[:phase], sums, *work.sums[phase + 1 :]])

    def take_sums(self, phase: int) -> running_sums.Sums:
        """Copy the finished sums of a phase, as arrays of one slot."""
        return self._take_program(self._mesh, (phase, self._layout), self.work.sums[phase])

    def describe_sums(self, phase: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Describe the sum of a phase in shapes."""
        return {name: jax.ShapeDtypeStruct(shape[1:], dtype) for name, (shape, dtype) in self._layout.sums[phase]}

    def give_state(self) -> State:
        """Hand out the newest state to a loop: on the lead, or on all devices if a part of it lies cut over them.

        The arrays are remembered, so that `receive_state` knows them again. JAX computes with arrays of one set of devices alone, as when
        the user calls the model between two trainings.
        """
        if not self._lent:
            self._lent = self._replace_stand_ins(self._state) if self._cut.places else self.lead_program_state
        return self._lent

    def forget(self) -> None:
        """Drop what lies on the devices."""
        self._cut.drop(list(self._cut.places))
        self._state = ()
        self._buffers = {}
        self._lent = ()


def flatten_state(state: State) -> list[Array]:
    return list(itertools.chain.from_iterable(state))


def group_arrays(arrays: list[Array], like: State) -> State:
    """Split arrays into groups as large as a state's groups."""
    rest = iter(arrays)
    return tuple([list(itertools.islice(rest, len(group))) for group in like])


def make_blocks(tree: PyTree, mesh: DeviceMesh) -> PyTree:
    """Send the same host arrays to each device, as its block. Each device gets memory of its own."""
    # Copies: a CPU device may read a host array in place, and the memory of these buffers is donated.
    return map_tree(lambda array: mesh.put_blocks([array.copy() for _ in mesh.devices]), tree)


def copy_first_places(sums: running_sums.Sums) -> running_sums.Sums:
    return map_tree(lambda places: places[:1], sums)


def has_other_values(one: Array, other: Array) -> bool:
    return np.asarray(one).tobytes() != np.asarray(other).tobytes()
