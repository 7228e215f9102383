"""The devices of a process, and the arrays that lie on them.

All devices have the same values of an array, or each has a block. An array over several devices is one object for Python, so a call that
runs on all of them has as few arguments as a call on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from unisono._src.programs.private.device_arrays import list_blocks, put_blocks, take_first_copies
from unisono._src.typed_jax import device_put
from unisono._src.typing import Array, PyTree, Shape

if TYPE_CHECKING:
    from jax.typing import DTypeLike

AXIS = "devices"


class DeviceMesh:
    """Devices of this process, in order. The arrays of a single device are ordinary arrays on it."""

    def __init__(self, devices: tuple[jax.Device, ...]) -> None:
        self.devices = devices
        self.lead = devices[0]
        self.size = len(devices)
        self.shares_memory = devices[0].platform == "cpu"
        """Whether the process reads and writes the memory of all devices."""
        self._mesh = Mesh(np.array(devices), (AXIS,))
        if len(devices) == 1:
            self.everywhere: Sharding = SingleDeviceSharding(devices[0])
            self.by_device: Sharding = self.everywhere
        else:
            self.everywhere = NamedSharding(self._mesh, PartitionSpec())
            self.by_device = NamedSharding(self._mesh, PartitionSpec(AXIS))

    def put_everywhere(self, tree: PyTree) -> PyTree:
        """Send arrays to all devices."""
        return device_put(tree, self.everywhere)

    def put_blocks(self, blocks: Sequence[np.ndarray]) -> Array:
        """Send each device its block, as one array over the devices. The blocks are joined at the first axis."""
        return put_blocks(blocks, self.by_device, self.devices)

    def describe_everywhere(self, shape: Shape, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Describe an array that lies on all devices, in shapes."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.everywhere)

    def describe_blocks(self, shape: Shape, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Describe an array with a block of this shape on each device."""
        return jax.ShapeDtypeStruct((self.size * shape[0], *shape[1:]), dtype, sharding=self.by_device)

    def cut_at(self, axis: int) -> Sharding:
        """Say that each device has a part of an array along an axis."""
        return NamedSharding(self._mesh, PartitionSpec(*[None] * axis, AXIS))

    def map_blocks(self, function: Callable[..., PyTree], cut: PyTree, cut_results: PyTree) -> Callable[..., PyTree]:
        """Make a function of arrays over several devices. Each device calls `function` with its part.

        `cut` and `cut_results` tell which arguments and results differ from device to device.
        """
        specs = {True: PartitionSpec(AXIS), False: PartitionSpec()}
        given, returned = (jax.tree.map(specs.__getitem__, tree) for tree in (cut, cut_results))
        return jax.shard_map(function, mesh=self._mesh, in_specs=given, out_specs=returned, check_vma=False)

    def is_cut(self, leaf: object) -> bool:
        """Whether an array, or what describes it, has a block on each of several devices."""
        return self.size > 1 and isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and leaf.sharding == self.by_device

    def is_everywhere(self, leaf: object) -> bool:
        """Whether an array lies on all devices."""
        return isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding == self.everywhere

    def list_blocks(self, array: Array) -> Sequence[Array]:
        """List the parts of an array that lie on each device."""
        return [array] if self.size == 1 else list_blocks(array)

    def on_lead(self, arrays: list[Array]) -> list[Array]:
        """Take the lead's copies of arrays, in the same memory. The arrays lie on all devices."""
        return arrays if self.size == 1 else take_first_copies(arrays)


@functools.cache
def get_mesh(devices: tuple[jax.Device, ...]) -> DeviceMesh:
    """Get the mesh of these devices. A device that is named twice counts once."""
    unique = tuple(dict.fromkeys(devices))
    return DeviceMesh(unique) if unique == devices else get_mesh(unique)
