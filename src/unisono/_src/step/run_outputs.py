"""The outputs of replicas, which stay on their devices, and their way into a later step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.step.plan import ReplicaRun
from unisono._src.typing import Array, PyTree

DescribeOutputs: TypeAlias = Callable[[int], Sequence[jax.ShapeDtypeStruct]]
"""Returns the outputs of a replica with a number of rows, in shapes."""


ReplicaOutputs: TypeAlias = Sequence[Array]
"""The outputs of replicas, stacked."""


class RunOutput(NamedTuple):
    """The outputs of a run of replicas, on their device."""

    device: int
    run: ReplicaRun
    arrays: ReplicaOutputs
    """One array for each output, with a first axis of replicas; there may be room for more replicas than ran."""


class CarriedValue(Protocol):
    """One array of the outputs of an earlier step, which replicas take as input."""

    def shapes(self, size: int) -> jax.ShapeDtypeStruct:
        """Return the shape of the value of a replica with this number of rows."""
        ...

    @property
    def present(self) -> Mapping[int, Array]:
        """Return the values of the replicas of all processes that had rows, by the replicas' numbers."""
        ...

    def on(self, device: int, run: ReplicaRun) -> Array:
        """Return the values of a run of replicas, stacked."""
        ...


def describe_replica_batch(batch: GlobalBatch, carried: Sequence[CarriedValue], rows: int) -> PyTree:
    """Return what a replica with this number of rows gets, in shapes: its rows, or (rows, values) where values are carried over."""
    shapes = batch.shapes(rows)
    return (shapes, [value.shapes(rows) for value in carried]) if carried else shapes
