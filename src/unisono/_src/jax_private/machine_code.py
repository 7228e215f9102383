"""Machine code: where JAX keeps it, and how it is loaded on another device than the one that it was compiled for."""

from __future__ import annotations

import io

import jax
import numpy as np
from jax._src import compiler
from jax._src.lru_cache import LRUCache as LRUCache
from jax.experimental import serialize_executable


def load_on_device(
    code: bytes, in_tree: jax.tree_util.PyTreeDef, out_tree: jax.tree_util.PyTreeDef, device: jax.Device
) -> jax.stages.Compiled:
    """Load serialized machine code on a device. CPU executables carry their devices, hence new options."""
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1, device_assignment=np.array([[device]]))

    class Unpickler(serialize_executable._JaxPjrtUnpickler):
        def persistent_load(self, pid: tuple[object, ...]) -> object:
            if pid[0] == "exec":
                return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
            return device if pid[0] == "device" else super().persistent_load(pid)

    unloaded, args_info, no_kwargs = Unpickler(io.BytesIO(code), device.client, [device]).load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)
