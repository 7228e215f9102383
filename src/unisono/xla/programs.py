"""A function compiled once and loaded on every device that runs it.

The same source compiled again is not always the same machine code, and compiling for eight devices takes eight times as
long as for one. So a program is compiled for the first device that asks, and its machine code is loaded on the others.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax._src import compiler  # checked with jax 0.10.2: CPU executables carry their devices, hence new options
from jax.experimental import serialize_executable


class Program:
    """`program(device, key, *args)` runs `function(*args)` on `device`; one compilation for each key.

    A key stands for the shapes and dtypes of the arguments. Arguments lie on `device` already, or are host arrays.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._portable: dict[Hashable, Portable] = {}
        self._loaded: dict[tuple[Hashable, jax.Device], jax.stages.Compiled] = {}

    def __call__(self, device: jax.Device, key: Hashable, *args: Any) -> Any:
        loaded = self._loaded.get((key, device))
        if loaded is None:
            loaded = self._loaded[key, device] = self._load(device, key, args)
        return loaded(*args)

    def _load(self, device: jax.Device, key: Hashable, args: tuple[Any, ...]) -> jax.stages.Compiled:
        if key in self._portable:
            return self._portable[key].on(device)
        with jax.default_device(device):
            compiled = jax.jit(self._function).lower(*args).compile()
        self._portable[key] = Portable(compiled)
        return compiled


class Portable:
    """Machine code that can be loaded on other devices than the one that it was compiled for."""

    def __init__(self, compiled: jax.stages.Compiled) -> None:
        self._compiled = compiled

    @functools.cached_property
    def _serialized(self) -> tuple[bytes, Any, Any]:
        return serialize_executable.serialize(self._compiled)

    def on(self, device: jax.Device) -> jax.stages.Compiled:
        payload, in_tree, out_tree = self._serialized
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1, device_assignment=np.array([[device]]))

        class Unpickler(serialize_executable._JaxPjrtUnpickler):
            def persistent_load(self, pid: Any) -> Any:
                if pid[0] == "exec":
                    return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
                return device if pid[0] == "device" else super().persistent_load(pid)

        unloaded, args_info, no_kwargs = Unpickler(io.BytesIO(payload), device.client, [device]).load()
        return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)
