"""Arrays that lie cut over the devices of a process. Each device has a part along one axis.

Programs know such an array by a number. They put it together where they read it (`call_put_together`), so no device has room for all of
them at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

from unisono._src.engine.device_mesh import DeviceMesh
from unisono._src.engine.digest import digest_on_host
from unisono._src.kernels.native.step_calls import drop_cut_array, keep_cut_array
from unisono._src.programs.private.device_arrays import list_blocks
from unisono._src.typing import AnyArray, Array, Shape

STAND_IN = jax.ShapeDtypeStruct((3,), np.int32)
"""What programs have in place of a cut array: its number, and its digest."""


SMALLEST = 1 << 14
"""Weights of fewer bytes stay whole: what they take is nothing beside an activation."""


def is_large(array: AnyArray | jax.ShapeDtypeStruct) -> bool:
    """Whether an array has enough bytes to be cut."""
    return array.size * array.dtype.itemsize >= SMALLEST


def read_digest(stand_in: Array) -> Array:
    """Read the digest of a cut array from what stands for it."""
    return cast(Array, lax.bitcast_convert_type(stand_in[1:], jnp.uint32))


def choose_axis(shape: Shape, mesh: DeviceMesh) -> int | None:
    """Choose the axis along which an array is cut over devices. None if no axis has equal parts, or there is one device."""
    axes = (axis for axis, length in enumerate(shape) if length and length % mesh.size == 0)
    return next(axes, None) if mesh.size > 1 else None


def choose_sharding(shape: Shape, mesh: DeviceMesh) -> Sharding | None:
    """Choose how an array lies cut over the devices. None if it cannot."""
    axis = choose_axis(shape, mesh)
    return None if axis is None else mesh.cut_at(axis)


def lies_cut(array: object, mesh: DeviceMesh) -> bool:
    """Whether an array lies cut over the devices."""
    return isinstance(array, jax.Array) and array.sharding == choose_sharding(array.shape, mesh)


class KeptArray(NamedTuple):
    """A cut array."""

    array: Array
    number: int
    """The number by which the kernels know it."""
    stand_in: np.ndarray
    """What programs have in its place."""


class CutArrays:
    """The cut arrays that the programs of one step read, by their places in the state."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._kept: dict[int, KeptArray] = {}
        self._newest: list[Array] = []
        """A result of the newest call. Once it is there, no program reads an array any more."""
        weakref.finalize(self, drop_arrays, self._kept, self._newest)

    def __getitem__(self, place: int) -> Array:
        return self._kept[place].array

    @property
    def places(self) -> frozenset[int]:
        """The places of all cut arrays."""
        return frozenset(self._kept)

    def keep(self, place: int, array: Array) -> np.ndarray:
        """Keep an array in place of the one before. The result stands for it in programs: its number, and its digest."""
        if place in self._kept and self._kept[place].array is array:
            return self._kept[place].stand_in
        self.drop([place])
        parts = list_blocks(jax.block_until_ready(array))
        blocks = math.prod(array.shape[: choose_axis(array.shape, self._mesh)])
        number = keep_cut_array([part.unsafe_buffer_pointer() for part in parts], blocks, parts[0].nbytes // blocks)
        lanes = np.array(digest_on_host(np.asarray(array)), np.uint32).view(np.int32)
        self._kept[place] = KeptArray(array, number, np.array([number, *lanes], np.int32))
        return self._kept[place].stand_in

    def note_call(self, result: Array) -> None:
        """Note a result of the newest call that may read the arrays."""
        self._newest[:] = [result]

    def drop(self, places: Sequence[int]) -> None:
        """Forget the arrays at these places."""
        dropped = {place: self._kept.pop(place) for place in places if place in self._kept}
        drop_arrays(dropped, self._newest)


def drop_arrays(arrays: dict[int, KeptArray], newest: list[Array]) -> None:
    """Forget arrays, when no program reads them any more."""
    if arrays:
        jax.block_until_ready([result for result in newest if not result.is_deleted()])
    for kept in arrays.values():
        drop_cut_array(kept.number)
    arrays.clear()
