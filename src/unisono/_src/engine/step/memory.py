"""The memory of a step on a device, known before the step runs."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import numpy as np

from unisono._src.engine.step.device_state import BufferLayout
from unisono._src.typing import Arguments, PyTree


class StepMemory(NamedTuple):
    """The bytes that steps need on each device beside their state."""

    sums: int
    """The running sums without gathered rows: gradients, and what else replicas add up."""
    gathered: int
    """Rows of all replicas, gathered in the running sums."""
    kept: int
    """What all replicas keep for a later phase of the step."""
    inputs: int
    """The rows of a call, and its orders. Those of the next call are sent while it runs."""
    temporary: int
    """What the program asks for while it runs: activations, a replica's own gradient."""
    results: int
    """Logs, digests and outputs of a call."""
    cut_places: frozenset[int]
    """The places of the state's arrays of which each device holds a part."""


def measure_step(
    layout: BufferLayout,
    gathered: int,
    inputs: Arguments,
    devices: int,
    compiled: jax.stages.Compiled,
    cut_places: frozenset[int],
) -> StepMemory:
    """Measure a step by the layout of its buffers and by its program.

    Args:
        layout: The layout of the buffers.
        gathered: The bytes of gathered rows in the running sums.
        inputs: The other arguments of the program, in shapes, with a block for each of the devices.
        devices: The number of devices.
        compiled: The program.
        cut_places: The places of the state's arrays that lie cut.
    """
    sums = sum(count_layout(shape, dtype) for of_phase in layout.sums for _, (shape, dtype) in of_phase)
    kept = sum(count_layout(*array) for _, phases in layout.kept for of_phase in phases for array in of_phase)
    program = compiled.memory_analysis()
    if program is None:
        raise RuntimeError(
            f"XLA does not tell the memory of a program for {jax.default_backend()}, which strategy.memory and unisono memory read. It does on CPU "
            f"and GPU: start the program with JAX_PLATFORMS=cpu. The table is then of CPU devices, whose programs need other temporary memory."
        )
    temporary, results = program.temp_size_in_bytes, program.output_size_in_bytes - program.alias_size_in_bytes
    return StepMemory(sums - gathered, gathered, kept, count_bytes(inputs) // devices, temporary, results, cut_places)


def count_bytes(tree: PyTree) -> int:
    """Count the bytes of the arrays of a tree, given in shapes."""
    return sum(count_layout(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


def count_layout(shape: tuple[int, ...], dtype: np.dtype | str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize
