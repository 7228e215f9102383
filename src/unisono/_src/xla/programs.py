"""A function compiled once and loaded on every device that runs it.

The same source compiled again is not always the same machine code, and compiling for eight devices takes eight times as
long as for one. So a program is compiled for the first device that asks, and its machine code is loaded on the others; and by later
processes, where the user has named a folder for it (`kept`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import io
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import compiler  # checked with jax 0.10.2: CPU executables carry their devices, hence new options
from jax.errors import JaxRuntimeError
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from unisono._src.processes.progress import current
from unisono._src.xla import determinism, disk_cache, tracing

NOT_PORTABLE = (AttributeError, NotImplementedError, TypeError, ValueError, pickle.PicklingError, JaxRuntimeError)
"""What is raised where machine code cannot be written down."""


class Program:
    """`program(device, key, *args)` runs `function(*args)` on `device`; one compilation for each key.

    A key stands for the shapes and dtypes of the arguments. Arguments lie on `device` already, or are host arrays.
    """

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> None:
        """The memory of the arguments at the positions in `donate` is used again."""
        self._function = function
        self._donate = donate
        self._portable: dict[Hashable, Portable] = {}
        self._loaded: dict[tuple[Hashable, jax.Device], jax.stages.Compiled] = {}

    def __call__(self, device: jax.Device, key: Hashable, *args: Any) -> Any:
        if tracing.is_disabled():  # what is the user's then runs without us; this is ours
            with jax.disable_jit(False):
                return self.loaded(device, key, *args)(*args)
        return self.loaded(device, key, *args)(*args)

    def loaded(self, device: jax.Device, key: Hashable, *args: Any) -> jax.stages.Compiled:
        """What runs on the device with such arguments, compiled and loaded if it was not."""
        loaded = self._loaded.get((key, device))
        if loaded is None:
            loaded = self._loaded[key, device] = self._load(device, key, args)
        return loaded

    def _load(self, device: jax.Device, key: Hashable, args: tuple[Any, ...]) -> jax.stages.Compiled:
        if key not in self._portable:
            self._portable[key] = portable(self._lowered(device, args), device)
        try:
            return self._portable[key].on(device)
        except NOT_PORTABLE as error:
            if isinstance(error, JaxRuntimeError) and "not serializable" not in str(error):
                raise
            warnings.warn(
                f"A program cannot be loaded on {device} as it was compiled, and is compiled again for it: its results there "
                f"may differ in their last bits. A callback to Python (jax.debug.print, io_callback, pure_callback) in the "
                f"model does this, and so does the sorting in some layers (MixUp, CutMix); to have the same bits for sure, run "
                f"all replicas on one device: OneDeviceStrategy(replicas=R). "
                f"({type(error).__name__}: {error})",
                stacklevel=2,
            )
            return compiled(self._lowered(device, args), device)

    def _lowered(self, device: jax.Device, args: tuple[Any, ...]) -> jax.stages.Lowered:
        """Return the program as JAX lowers it.

        Arguments that are not used stay in it, since a program is found by its text: two that use different ones would be one.
        """
        with jax.default_device(device):
            return jax.jit(self._function, donate_argnums=self._donate, keep_unused=True).lower(*args)


def compiled(lowered: jax.stages.Lowered, device: jax.Device) -> jax.stages.Compiled:
    with without_cache(), current().busy("compiling"):
        return lowered.compile(compiler_options=determinism.compiler_options(device.platform))


MOST_SHARED = 64
_shared: collections.OrderedDict[Hashable, Portable] = collections.OrderedDict()


def portable(lowered: jax.stages.Lowered, device: jax.Device) -> Portable:
    """The machine code of a program; where the same program was compiled not long ago, for a model of the same make, that
    code: one who trains such a model again, or in another placement, does not wait for the compiler again."""
    text = lowered.as_text()
    if "callback" in text:  # it holds the address of a function of this very model
        return Portable.of(compiled(lowered, device), device)
    key = hashlib.sha256(text.encode()).digest(), lowered.in_tree, lowered.out_tree, device.platform
    if key not in _shared:
        _shared[key] = kept_or_compiled(lowered, text, device)
    _shared.move_to_end(key)
    while len(_shared) > MOST_SHARED:
        _shared.popitem(last=False)
    return _shared[key]


def kept_or_compiled(lowered: jax.stages.Lowered, text: str, device: jax.Device) -> Portable:
    if not disk_cache.is_wanted():
        return Portable.of(compiled(lowered, device), device)
    name = disk_cache.key_of(text, device)
    code = disk_cache.read(name)
    if code is not None:
        try:
            return Portable.of_code(code, lowered, device)
        except Exception as error:
            warnings.warn(f"A program that was kept on disk cannot be loaded, and is compiled again: {error}.", stacklevel=2)
            disk_cache.drop(name)
    start = time.monotonic()
    made = Portable.of(compiled(lowered, device), device)
    seconds = time.monotonic() - start
    with contextlib.suppress(*NOT_PORTABLE):
        disk_cache.write(name, made.code, seconds)
    return made


def forget_shared() -> None:
    """The next programs are compiled anew."""
    _shared.clear()


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Machine code that comes out of JAX's compilation cache on disk cannot be loaded on other devices."""
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
    """Machine code that can be loaded on other devices than the one that it was compiled for.

    It stays loaded there as long as a model uses it, and on the first one as long as this object is there: a process may have 65 530
    pieces of memory of its own on Linux, and machine code takes dozens for each device.
    """

    def __init__(self, serialize: Callable[[], tuple[bytes, Any, Any]]) -> None:
        self._serialize = serialize
        self._loaded: weakref.WeakValueDictionary[jax.Device, jax.stages.Compiled] = weakref.WeakValueDictionary()
        self._first: jax.stages.Compiled | None = None

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, device: jax.Device) -> Portable:
        """What was compiled for a device."""
        portable = cls(lambda: serialize_executable.serialize(compiled))
        portable._first = portable._loaded[device] = compiled
        return portable

    @classmethod
    def of_code(cls, code: bytes, lowered: jax.stages.Lowered, device: jax.Device) -> Portable:
        """What an earlier process made of the same program."""
        portable = cls(lambda: (code, jax.tree.structure(lowered.args_info), lowered.out_tree))
        portable._first = portable.on(device)
        return portable

    @property
    def code(self) -> bytes:
        return self._serialized[0]

    @functools.cached_property
    def _serialized(self) -> tuple[bytes, Any, Any]:
        return self._serialize()

    def on(self, device: jax.Device) -> jax.stages.Compiled:
        loaded = self._loaded.get(device)
        if loaded is None:
            loaded = self._loaded[device] = self._load(device)
        return loaded

    def _load(self, device: jax.Device) -> jax.stages.Compiled:
        payload, in_tree, out_tree = self._serialized
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1, device_assignment=np.array([[device]]))

        class Unpickler(serialize_executable._JaxPjrtUnpickler):
            def persistent_load(self, pid: Any) -> Any:
                if pid[0] == "exec":
                    return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
                return device if pid[0] == "device" else super().persistent_load(pid)

        unloaded, args_info, no_kwargs = Unpickler(io.BytesIO(payload), device.client, [device]).load()
        return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)
