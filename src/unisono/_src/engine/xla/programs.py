"""Functions that are compiled once and loaded on every device.

A second compilation of the same source may give other machine code, and compiling for eight devices takes eight times as long as
for one. So a program is compiled for the first device that needs it. The other devices load the same machine code, and so do
later processes if the user has named a folder for it (`disk_cache`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias

import jax
from jax.errors import JaxRuntimeError
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from unisono._src.engine.device_mesh import DeviceMesh, get_mesh
from unisono._src.engine.xla import determinism, disk_cache
from unisono._src.old_objects import spare_old_objects
from unisono._src.processes.activity import get_activity
from unisono._src.programs.private import jaxprs
from unisono._src.programs.private.machine_code import load_on_devices
from unisono._src.typed_jax import settings
from unisono._src.typing import AnyArray, Arguments, PyTree

NOT_PORTABLE = (AttributeError, NotImplementedError, TypeError, ValueError, pickle.PicklingError, JaxRuntimeError)
"""Errors of JAX for machine code that cannot be serialized, or not be loaded on other devices."""


class FixedProgramError(Exception):
    """A program runs only where it is compiled.

    Its machine code cannot be moved, or holds addresses of this process.
    """


Serialized: TypeAlias = tuple[bytes, jax.tree_util.PyTreeDef, jax.tree_util.PyTreeDef]
"""Machine code, and the structures of the arguments and of the result."""


class DeviceProgram:
    """A function that is compiled once for each key and runs anywhere.

    `program(place, key, *args)` runs it on a device, or on all devices of a mesh. A key stands for the shapes and dtypes of the
    arguments. The arguments are arrays there, or host arrays; to find the executable, shapes with shardings are enough. A device of a
    mesh is given its part of each array, and runs the machine code that a single device runs. Programs are kept as long as this
    object, for any number of keys: shapes that come back must not be compiled again.
    """

    def __init__(self, function: Callable[..., PyTree], donate: tuple[int, ...] = (), cut: PyTree = False) -> None:
        """Keep the function.

        Args:
            function: What to compile.
            donate: The positions of the arguments whose memory is used again.
            cut: Which arrays of the result differ from device to device of a mesh: a tree of the result's structure, or of its upper part.
        """
        self._function = function
        self._donate = donate
        self._cut = cut
        self._portable: dict[Hashable, PortableProgram] = {}
        self._loaded: dict[tuple[Hashable, jax.Device | DeviceMesh], jax.stages.Compiled] = {}

    def __call__(self, place: jax.Device | DeviceMesh, key: Hashable, *args: PyTree) -> PyTree:
        # Where the user has disabled it, functions of the user's run uncompiled, and our programs stay compiled.
        with jax.disable_jit(False) if jaxprs.is_jit_disabled() else contextlib.nullcontext():
            return self.find_or_load(place, key, *args)(*args)

    def find_or_load(self, place: jax.Device | DeviceMesh, key: Hashable, *args: PyTree) -> jax.stages.Compiled:
        """Find the executable for the place and the key. It is compiled and loaded if it was not."""
        loaded = self._loaded.get((key, place))
        if loaded is None:
            loaded = self._loaded[key, place] = self._load(place, key, args)
        return loaded

    @spare_old_objects()
    def _load(self, place: jax.Device | DeviceMesh, key: Hashable, args: Arguments) -> jax.stages.Compiled:
        mesh = place if isinstance(place, DeviceMesh) else get_mesh((place,))
        lead = mesh.lead
        if key not in self._portable:
            try:
                self._portable[key] = find_or_compile(self._lower(determinism.choose_compile_device(lead), mesh, args), lead)
            except FixedProgramError:
                self._portable[key] = PortableProgram(compile_lowered(self._lower(lead, mesh, args), lead), lead)
        try:
            return self._portable[key].load_on(mesh, [mesh.is_cut(leaf) for leaf in jax.tree.leaves(args)], self._cut)
        except FixedProgramError as error:
            warnings.warn(
                f"A program cannot be loaded on {', '.join(map(str, mesh.devices))} as it was compiled, and is compiled again for it: its "
                f"results there may differ in their last bits. A callback to Python (jax.debug.print, io_callback, pure_callback) in the "
                f"model does this; to have the same bits for sure, run all replicas on one device: OneDeviceStrategy(replicas=R). "
                f"({error})",
                stacklevel=2,
            )
            return compile_lowered(self._lower_fixed(mesh, args), lead)

    def _lower(self, device: jax.Device, mesh: DeviceMesh, args: Arguments) -> jax.stages.Lowered:
        """Lower the program of one device.

        Unused arguments stay in the program, because it is found again by its text: else two programs that use different arguments could have one
        text.
        """
        with jax.default_device(device):
            jitted = jax.jit(self._function, donate_argnums=self._donate, keep_unused=True)
            return jitted.lower(*describe_arguments(args, device, mesh))

    def _lower_fixed(self, mesh: DeviceMesh, args: Arguments) -> jax.stages.Lowered:
        """Lower the program of a mesh, where code cannot be moved."""
        if mesh.size == 1:
            return self._lower(mesh.lead, mesh, args)
        function = mesh.map_blocks(self._function, jax.tree.map(mesh.is_cut, args), self._cut)
        return jax.jit(function, donate_argnums=self._donate, keep_unused=True).lower(*args)


def describe_arguments(args: Arguments, device: jax.Device, mesh: DeviceMesh) -> Arguments:
    """Describe one device's part of the arguments, in shapes.

    JAX lets results stay on their device if one of the arguments has to.
    """
    stays = any(map(has_to_stay, jax.tree.leaves(args)))
    sharding = SingleDeviceSharding(device) if stays else None

    def describe(leaf: jax.ShapeDtypeStruct, whole: AnyArray) -> jax.ShapeDtypeStruct:
        shape = (leaf.shape[0] // mesh.size, *leaf.shape[1:]) if mesh.is_cut(whole) else leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)

    return jax.tree.map(describe, jax.eval_shape(lambda *args: args, *args), args)


def has_to_stay(leaf: object) -> bool:
    """Whether an array, or what describes it, has to stay on its device."""
    return leaf.committed if isinstance(leaf, jax.Array) else getattr(leaf, "sharding", None) is not None


def compile_lowered(lowered: jax.stages.Lowered, device: jax.Device) -> jax.stages.Compiled:
    with disable_jax_cache(), get_activity().report_busy("compiling"):
        return lowered.compile(compiler_options=determinism.get_compiler_options(device.platform))


MOST_SHARED = 64
_shared: collections.OrderedDict[Hashable, PortableProgram] = collections.OrderedDict()


def find_or_compile(lowered: jax.stages.Lowered, device: jax.Device) -> PortableProgram:
    """Find the machine code of a program, or compile it.

    Programs compiled not long ago are shared: a user who trains an equal model again, or on another placement, does not wait for
    the compiler twice.
    """
    text = lowered.as_text()
    if "callback" in text:  # the text holds the address of a function of this model
        raise FixedProgramError("a callback")
    key = hashlib.sha256(text.encode()).digest(), lowered.in_tree, lowered.out_tree, device.platform
    if key not in _shared:
        _shared[key] = load_or_compile(lowered, text, device)
    _shared.move_to_end(key)
    while len(_shared) > MOST_SHARED:
        _shared.popitem(last=False)
    return _shared[key]


def load_or_compile(lowered: jax.stages.Lowered, text: str, device: jax.Device) -> PortableProgram:
    """Load a program from disk, or compile it and write it there."""
    if not disk_cache.is_cache_wanted():
        return compile_portable(lowered, device)
    key = disk_cache.compute_key(text, device)
    code = disk_cache.read_code(key)
    if code is not None:
        try:
            serialized = code, jax.tree.structure(lowered.args_info), lowered.out_tree
            return PortableProgram(load_on_devices(*serialized, [device]), device, serialized)
        except Exception as error:  # of a damaged or foreign file, which JAX reads; the warning says what it was
            warnings.warn(f"A program that was kept on disk cannot be loaded, and is compiled again: {error}.", stacklevel=2)
            disk_cache.drop_code(key)
    start = time.monotonic()
    program = compile_portable(lowered, device)
    seconds = time.monotonic() - start
    with contextlib.suppress(FixedProgramError):
        disk_cache.write_code(key, program.code, seconds)
    return program


def compile_portable(lowered: jax.stages.Lowered, device: jax.Device) -> PortableProgram:
    """Compile a lowered program and load it on the device.

    It was lowered for the device's compile device (`choose_compile_device`).
    """
    compiled = compile_lowered(lowered, device)
    if determinism.choose_compile_device(device) is device:
        return PortableProgram(compiled, device)
    serialized = serialize(compiled)
    return PortableProgram(load_on_devices(*serialized, [device]), device, serialized)


def serialize(compiled: jax.stages.Compiled) -> Serialized:
    """Serialize an executable. `FixedProgramError` says that it cannot be moved."""
    try:
        return serialize_executable.serialize(compiled)
    except NOT_PORTABLE as error:
        if isinstance(error, JaxRuntimeError) and "not serializable" not in str(error):
            raise
        raise FixedProgramError(f"{type(error).__name__}: {error}") from error


def forget_shared_programs() -> None:
    """Forget the shared programs: the next ones are compiled anew."""
    _shared.clear()


@contextlib.contextmanager
def disable_jax_cache() -> Iterator[None]:
    """Switch JAX's compilation cache off for the block. Machine code from it cannot be loaded on other devices."""
    if not settings.jax_compilation_cache_dir:
        yield
        return
    enabled = settings.jax_enable_compilation_cache
    compilation_cache.reset_cache()  # JAX asks once whether there is one
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


class PortableProgram:
    """Machine code that can be loaded on other devices.

    It stays loaded on a device as long as a model uses it, and on the first device as long as this object lives: a process may have
    65 530 memory mappings on Linux, and machine code takes dozens for each device.
    """

    def __init__(self, first: jax.stages.Compiled, device: jax.Device, serialized: Serialized | None = None) -> None:
        """Keep a loaded program. It is serialized at first need if `serialized` is not given."""
        self._first = first
        self._loaded: weakref.WeakValueDictionary[Hashable, jax.stages.Compiled] = weakref.WeakValueDictionary()
        self._loaded[get_mesh((device,))] = first
        self._given = serialized

    @functools.cached_property
    def _serialized(self) -> Serialized:
        return self._given or serialize(self._first)

    @property
    def code(self) -> bytes:
        return self._serialized[0]

    def load_on(self, mesh: DeviceMesh, cut_arguments: Sequence[bool] = (), cut: PyTree = False) -> jax.stages.Compiled:
        """Load the program on the devices of a mesh, once.

        Args:
            mesh: The devices.
            cut_arguments: For each array of the arguments, whether devices have different parts.
            cut: The same of the results, as a tree.
        """
        key: Hashable = mesh
        shardings = None
        if mesh.size > 1:
            out_tree = self._serialized[2]
            cut_results = jax.tree.leaves(jax.tree.broadcast(cut, out_tree.unflatten(range(out_tree.num_leaves))))
            sharding = {True: mesh.by_device, False: mesh.everywhere}
            key = mesh, tuple(cut_arguments), tuple(cut_results)
            shardings = list(map(sharding.__getitem__, cut_arguments)), list(map(sharding.__getitem__, cut_results))
        loaded = self._loaded.get(key)
        if loaded is None:
            try:
                loaded = self._loaded[key] = load_on_devices(*self._serialized, mesh.devices, shardings)
            except NOT_PORTABLE as error:
                raise FixedProgramError(f"{type(error).__name__}: {error}") from error
        return loaded
