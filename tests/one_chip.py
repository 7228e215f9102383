"""A plugin of pytest: several devices of a strategy are one device of this machine, so that a single GPU tries all placements.

make one-chip        python -m pytest -p one_chip tests/fit

Each place of the placement has arrays of its own on the device, and the programs and copies that a device of its own would have. What is
not tried are links between devices.
"""

from __future__ import annotations

import os
from typing import Any

from unisono._src.xla.determinism import add_missing_flags

os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # tests compare with Keras to more digits than TF32 has
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the memory
add_missing_flags()  # tests make arrays before they make a strategy


ELSEWHERE = (
    "test_a_flipped_bit_is_found_and_attributed",
    "test_two_devices_tell_a_fault_that_does_not_repeat",
    "test_the_kernel_writes_no_place_that_is_not_there",
    "test_any_placement_and_any_number_of_empty_replicas[cpu]",
)
"""Tests that name one of several devices, or that call kernels for CPU."""


# JAX is imported inside of functions: pytest loads a plugin before conftest.py, which has settings for JAX.


def find_devices(arguments: Any) -> list[Any]:
    """Return the first device as often as the strategy asks for devices."""
    import jax

    from unisono._src.strategy import device_arguments

    if isinstance(arguments.devices, int):
        return jax.local_devices()[:1] * arguments.devices
    return device_arguments.find_devices(arguments)


def copy_to(tree: Any, device: Any) -> Any:
    """Return a copy of arrays on a device: `jax.device_put` returns the same memory where they lie there, and a step gives it away."""
    import jax
    import jax.numpy as jnp

    def copy(array: Any) -> Any:
        is_there = isinstance(array, jax.Array) and array.devices() == {device}
        return jnp.array(array, copy=True) if is_there else jax.device_put(array, device)

    return jax.tree.map(copy, tree)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    left_out = [item for item in items if item.name.startswith(ELSEWHERE)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    from unisono._src.step import device_state, single_replica
    from unisono._src.strategy import base

    base.find_devices = find_devices
    device_state.device_put = copy_to
    single_replica.device_put = copy_to
