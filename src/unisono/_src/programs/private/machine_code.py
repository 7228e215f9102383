"""Machine code: JAX's cache of it, and loading it on other devices."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

import jax
import numpy as np
from jax import core
from jax._src import compiler
from jax._src.lru_cache import LRUCache as LRUCache
from jax.experimental import serialize_executable
from jax.sharding import Sharding
from jaxlib import xla_client


def load_on_devices(
    code: bytes,
    in_tree: jax.tree_util.PyTreeDef,
    out_tree: jax.tree_util.PyTreeDef,
    devices: Sequence[jax.Device],
    shardings: tuple[Sequence[Sharding], Sequence[Sharding]] | None = None,
) -> jax.stages.Compiled:
    """Load serialized machine code of one device on several devices.

    Each call runs all of them. `shardings` are those of the arguments and results over several devices, each of which gets its part.
    Executables of CPU carry their devices, hence new options.
    """
    options = compiler.get_compile_options(
        num_replicas=len(devices), num_partitions=1, device_assignment=np.array([[device] for device in devices])
    )
    lead = devices[0]

    class Unpickler(serialize_executable._JaxPjrtUnpickler):
        def persistent_load(self, pid: tuple[object, ...]) -> object:
            if pid[0] == "exec":
                return self.backend.deserialize_executable(pid[1], xla_client.DeviceList(tuple(devices)), options)
            return lead if pid[0] == "device" else super().persistent_load(pid)

    unloaded, args_info, no_kwargs = Unpickler(io.BytesIO(code), lead.client, [lead]).load()
    if shardings is not None:
        given, returned = shardings
        unloaded = dataclasses.replace(
            unloaded,
            device_list=xla_client.DeviceList(tuple(devices)),
            input_avals=list(map(describe_whole, unloaded.input_avals, given)),
            input_shardings=list(given),
            output_avals=list(map(describe_whole, unloaded.output_avals, returned)),
            output_shardings=list(returned),
            committed=True,
            all_args_info=None,  # the shapes of one device
        )
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)


def describe_whole(part: core.ShapedArray, sharding: Sharding) -> core.ShapedArray:
    """Describe the array that has such a part on each device."""
    if sharding.is_fully_replicated:
        return part
    return part.update(shape=(len(sharding.device_set) * part.shape[0], *part.shape[1:]))
