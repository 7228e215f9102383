"""A function compiled once and loaded on every device that runs it.

The same source compiled again is not always the same machine code, and compiling for eight devices takes eight times as
long as for one. So a program is compiled for the first device that asks, and its machine code is loaded on the others.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import compiler  # checked with jax 0.10.2: CPU executables carry their devices, hence new options
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache


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
            try:
                return self._portable[key].on(device)
            except (AttributeError, NotImplementedError, TypeError, ValueError, pickle.PicklingError) as error:
                warnings.warn(
                    f"A program cannot be loaded on {device} as it was compiled, and is compiled again for it: its results there "
                    f"may differ in their last bits. A callback to Python (jax.debug.print, io_callback, pure_callback) in the "
                    f"model does this; to debug with the same bits, run all replicas on one device: OneDeviceStrategy(replicas=R). "
                    f"({type(error).__name__}: {error})",
                    stacklevel=2,
                )
                return self._compile(device, args)
        compiled = self._compile(device, args)
        self._portable[key] = Portable(compiled)
        return compiled

    def _compile(self, device: jax.Device, args: tuple[Any, ...]) -> jax.stages.Compiled:
        with jax.default_device(device), without_cache():
            return jax.jit(self._function).lower(*args).compile()


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Machine code that comes out of JAX's compilation cache on disk cannot be loaded on other devices, and may have been made
    by another machine: programs are compiled here."""
    if not jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        yield
        return
    enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    compilation_cache.reset_cache()  # JAX asks once whether there is one
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


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
