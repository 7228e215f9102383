"""The outputs of replicas, which stay on their devices. A later step may take them as inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax

from unisono._src.engine.device_mesh import DeviceMesh
from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.step.plan import ReplicaRun, Runs
from unisono._src.typing import Array, PyTree

DescribeOutputs: TypeAlias = Callable[[int], Sequence[jax.ShapeDtypeStruct]]
"""Describes in shapes the outputs of a replica with this number of rows."""


ReplicaOutputs: TypeAlias = Sequence[Array]
"""The outputs of replicas, stacked."""


class RunOutput(NamedTuple):
    """The outputs of the replicas of one call, on their devices."""

    mesh: DeviceMesh
    runs: Runs
    """The run of each device; None for one that ran no replica."""
    arrays: ReplicaOutputs
    """One array for each output, over the devices. The first axis of a device's part is replicas, with room for more than it ran."""

    def list_runs(self) -> list[tuple[ReplicaRun, list[Array]]]:
        """List each device's run with its part of the arrays. A part is on its device. Devices without a run are left out."""
        blocks = list(map(self.mesh.list_blocks, self.arrays))
        return [(run, [block[device] for block in blocks]) for device, run in enumerate(self.runs) if run is not None]

    def list_values(self, index: int) -> dict[int, Array]:
        """List an output of each replica, on its device."""
        return {run.first + number: arrays[index][number] for run, arrays in self.list_runs() for number in range(run.count)}


class CarriedValue(Protocol):
    """An output of an earlier step, as an input of replicas."""

    def shapes(self, size: int) -> jax.ShapeDtypeStruct:
        """Describe in shapes the value of a replica of this size."""
        ...

    @property
    def own(self) -> Mapping[int, Array]:
        """The values of this process's replicas with rows, by their numbers."""
        ...

    @property
    def present(self) -> Mapping[int, Array]:
        """The values of all processes' replicas with rows, by their numbers."""
        ...

    def on(self, runs: Runs) -> Array:
        """Stack the values of one call's replicas, on their devices."""
        ...

    def make_rows_error(self) -> ValueError:
        """Build the error about a batch of other rows. The values were computed of a batch of other sizes."""
        ...


def describe_replica_batch(batch: GlobalBatch, carried: Sequence[CarriedValue], rows: int) -> PyTree:
    """Describe in shapes a replica's input, for this number of rows. It is rows, or (rows, values) if values are carried over."""
    shapes = batch.shapes(rows)
    return (shapes, [value.shapes(rows) for value in carried]) if carried else shapes
