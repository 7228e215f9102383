"""The outputs of replicas, which stay on their devices, and their way into a later step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.device_mesh import DeviceMesh
from unisono._src.step.plan import ReplicaRun, Runs
from unisono._src.typing import Array, PyTree

DescribeOutputs: TypeAlias = Callable[[int], Sequence[jax.ShapeDtypeStruct]]
"""Returns the outputs of a replica with a number of rows, in shapes."""


ReplicaOutputs: TypeAlias = Sequence[Array]
"""The outputs of replicas, stacked."""


class RunOutput(NamedTuple):
    """The outputs of the replicas of one call, on their devices."""

    mesh: DeviceMesh
    runs: Runs
    """The run of each device; None for one that ran no replica."""
    arrays: ReplicaOutputs
    """One array for each output, over the devices, of which each has a first axis of replicas, with room for more than it ran."""

    def list_runs(self) -> list[tuple[ReplicaRun, list[Array]]]:
        """Return the run of each device that ran replicas, with its part of the arrays, on the device."""
        blocks = list(map(self.mesh.list_blocks, self.arrays))
        return [(run, [block[device] for block in blocks]) for device, run in enumerate(self.runs) if run is not None]

    def list_values(self, index: int) -> dict[int, Array]:
        """Return an output of each replica, on its device."""
        return {run.first + number: arrays[index][number] for run, arrays in self.list_runs() for number in range(run.count)}


class CarriedValue(Protocol):
    """One array of the outputs of an earlier step, which replicas take as input."""

    def shapes(self, size: int) -> jax.ShapeDtypeStruct:
        """Return the shape of the value of a replica with this number of rows."""
        ...

    @property
    def own(self) -> Mapping[int, Array]:
        """Return the values of the replicas of this process that had rows, by the replicas' numbers."""
        ...

    @property
    def present(self) -> Mapping[int, Array]:
        """Return the values of the replicas of all processes that had rows, by the replicas' numbers."""
        ...

    def on(self, runs: Runs) -> Array:
        """Return the values of the replicas of one call, stacked, over the devices."""
        ...

    def make_rows_error(self) -> ValueError:
        """Return the error about a batch of other rows than those that the values were made of."""
        ...


def describe_replica_batch(batch: GlobalBatch, carried: Sequence[CarriedValue], rows: int) -> PyTree:
    """Return what a replica with this number of rows gets, in shapes: its rows, or (rows, values) where values are carried over."""
    shapes = batch.shapes(rows)
    return (shapes, [value.shapes(rows) for value in carried]) if carried else shapes
