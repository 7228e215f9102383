"""A plugin of pytest: several devices of a strategy are one device of this machine, so that a single GPU tries all placements.

make one-chip        python -m pytest -p one_chip tests/keras/fit

Each place of the placement has its blocks of arrays on the device, and calls the program that a device of its own would call, one place after
another. What is not tried are links between devices, and calls that run on several at once.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from typing import Any

from unisono._src.engine.xla.determinism import add_missing_flags

os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # tests compare with Keras to more digits than TF32 has
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the memory
add_missing_flags()  # tests make arrays before they make a strategy


ELSEWHERE = (
    "test_a_flipped_bit_is_found_and_attributed",
    "test_two_devices_tell_a_fault_that_does_not_repeat",
    "test_two_devices_that_both_repeat_cannot_be_told_apart",
    "test_a_whole_epoch_in_one_function_waits_for_nothing",
    "test_the_kernel_writes_no_place_that_is_not_there",
    "test_any_placement_and_any_number_of_empty_replicas[cpu]",
)
"""Tests that name one of several devices, that count their programs, or that call kernels for CPU."""


# JAX is imported inside of functions: pytest loads a plugin before conftest.py, which has settings for JAX.


def find_devices(arguments: Any) -> list[Any]:
    """Return the first device as often as the strategy asks for devices."""
    import jax

    from unisono._src.keras.strategy import device_arguments

    if isinstance(arguments.devices, int):
        return jax.local_devices()[:1] * arguments.devices
    return device_arguments.find_devices(arguments)


def make_mesh_on_one_chip(devices: tuple[Any, ...]) -> Any:
    """Return a mesh whose places are one device: its arrays are joined there, and its programs are called for one place after the other."""
    import jax
    import jax.numpy as jnp

    from unisono._src.engine.device_mesh import DeviceMesh

    class MeshOnOneChip(DeviceMesh):
        def __init__(self) -> None:
            super().__init__(devices[:1])
            self.devices, self.size, self.shares_memory = devices, len(devices), False
            self.cut: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

        def join(self, blocks: Any) -> Any:
            joined = jnp.concatenate(blocks)
            self.cut[id(joined)] = joined
            return joined

        def put_blocks(self, blocks: Any) -> Any:
            return self.join(jax.device_put(list(blocks), self.lead))

        def is_cut(self, leaf: Any) -> bool:
            return self.cut.get(id(leaf)) is leaf

        def list_blocks(self, array: Any) -> Any:
            return jnp.split(array, len(devices)) if self.is_cut(array) else [array] * len(devices)

        def on_lead(self, arrays: Any) -> Any:
            return arrays

        def run_in_turn(self, program: Any, cut_results: Any) -> Any:
            """Return a program of the places, of one of a place."""

            def run(*args: Any) -> Any:
                leaves, structure = jax.tree.flatten(args)
                blocks = [self.list_blocks(leaf) if self.is_cut(leaf) else None for leaf in leaves]
                results = []
                for place in range(len(devices)):  # a copy of what is whole: a call gives its memory away
                    own = [jnp.array(leaf) if of is None else of[place] for leaf, of in zip(leaves, blocks, strict=True)]
                    results.append(program(*structure.unflatten(own)))
                flags = jax.tree.broadcast(cut_results, results[0])
                return jax.tree.map(lambda is_cut, *parts: self.join(parts) if is_cut else parts[0], flags, *results)

            return run

    return MeshOnOneChip()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    left_out = [item for item in items if item.name.startswith(ELSEWHERE)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    from unisono._src.engine import device_mesh
    from unisono._src.engine.xla import programs
    from unisono._src.keras.strategy import base

    base.find_devices = find_devices
    get_mesh, load_on = device_mesh.get_mesh, programs.PortableProgram.load_on

    @functools.cache
    def get_any_mesh(devices: tuple[Any, ...]) -> Any:
        return make_mesh_on_one_chip(devices) if len(set(devices)) < len(devices) else get_mesh(devices)

    def load(self: Any, mesh: Any, cut_arguments: Any = (), cut: Any = False) -> Any:
        if len(set(mesh.devices)) == len(mesh.devices):
            return load_on(self, mesh, cut_arguments, cut)
        return mesh.run_in_turn(load_on(self, get_mesh(mesh.devices[:1])), cut)

    programs.PortableProgram.load_on = load
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("unisono.") and getattr(module, "get_mesh", None) is get_mesh:
            module.get_mesh = get_any_mesh
