"""Arrays over several devices, made of blocks and taken apart again. The public functions do more at this, which costs time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import jax
import numpy as np
from jax import core
from jax._src.interpreters import pxla
from jax.sharding import Sharding

from unisono._src.typing import Array


def put_blocks(blocks: Sequence[np.ndarray], sharding: Sharding, devices: Sequence[jax.Device]) -> Array:
    """Send each device its block, as one array over the devices.

    The blocks are joined at the first axis. A CPU device reads an aligned block in place.
    """
    shape = len(devices) * blocks[0].shape[0], *blocks[0].shape[1:]
    return pxla.batched_device_put(core.ShapedArray(shape, blocks[0].dtype), sharding, list(blocks), list(devices))


def list_blocks(array: Array) -> Sequence[Array]:
    """List an array's single-device arrays, in the order of the devices."""
    return array._arrays  # pyright: ignore[reportAttributeAccessIssue]


def take_first_copies(arrays: Sequence[Array]) -> list[Array]:
    """Take the first device's copies of arrays, in the same memory. The arrays lie on several devices."""
    return [array._fully_replicated_shard() for array in arrays]  # pyright: ignore[reportAttributeAccessIssue]


def write_first_rows(blocks: Sequence[Array], row: np.ndarray) -> None:
    """Write the first row of arrays on CPU devices, in place.

    They must have been computed, and nobody may read them at the moment.
    """
    address: int = row.__array_interface__["data"][0]
    for block in blocks:
        ctypes.memmove(block.unsafe_buffer_pointer(), address, row.nbytes)
