"""The inputs of the step program beside the device state: rows, values of an earlier step, constants and numbers, on the devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import numpy as np

from unisono._src.data.global_batch import IN_PLACE_BYTES, GlobalBatch, send_rows
from unisono._src.placement import Placement
from unisono._src.step.device_numbers import DeviceNumbers
from unisono._src.step.plan import ReplicaRun
from unisono._src.step.run_outputs import CarriedValue, describe_replica_batch
from unisono._src.typed_jax import device_put
from unisono._src.typing import AnyArray, Array, PyTree

CALL_BYTES = 2 * IN_PLACE_BYTES  # so that rows which are read in place are those of one step


class CallInputs:
    """The inputs of calls of the step program. One that runs no replica gets arrays of the same shapes, whose values are not read."""

    def __init__(self, placement: Placement, most_steps: int) -> None:
        """A call may take `most_steps`, and has room for the batches of all of them."""
        self._placement = placement
        self._most_steps = most_steps
        self._numbers = DeviceNumbers()
        self._constants: dict[int, list[AnyArray]] = {}
        self._carried: Sequence[CarriedValue] = ()
        self._idle_batches: dict[tuple[int, Hashable], PyTree] = {}
        """Batches for calls that run no replica, by device and kind of rows."""

    def keep(self, constants: Sequence[AnyArray], carried: Sequence[CarriedValue]) -> None:
        """Take the constants of the steps that begin, and the values that are carried over into them."""
        self._constants = {0: list(constants)}
        self._carried = carried

    @property
    def has_carried(self) -> bool:
        """Return whether values are carried over from an earlier step."""
        return bool(self._carried)

    def constants(self, index: int = 0) -> list[AnyArray]:
        """Return the constants on a device."""
        if index not in self._constants:
            self._constants[index] = device_put(self._constants[0], self._placement.devices[index])
        return self._constants[index]

    def shapes(self, batch: GlobalBatch, rows: int) -> PyTree:
        """Return the input of a replica with this number of rows, in shapes."""
        return describe_replica_batch(batch, self._carried, rows)

    def kind(self, batch: GlobalBatch, rows: int) -> Hashable:
        """Return what programs depend on, of the input of a replica with this number of rows."""
        carried = (value.shapes(rows) for value in self._carried)
        return rows, batch.signature, tuple((shape.shape, str(shape.dtype)) for shape in carried)

    def count_steps(self, batch: GlobalBatch, run: ReplicaRun) -> int:
        """Return how many steps one call may take: a function of the run's shapes, since the program has room for this number."""
        bytes_of_step = run.size * self._placement.replicas * batch.row_bytes
        return max(1, min(self._most_steps, CALL_BYTES // max(1, bytes_of_step)))

    def send_orders(self, index: int, orders: tuple[int, ...]) -> Array:
        """Return the orders of a call on a device."""
        return self._numbers.on(self._placement.devices[index], np.int32, orders)

    def send_batches(self, index: int, group: Sequence[GlobalBatch], run: ReplicaRun) -> PyTree:
        """Return the rows of a run of replicas, and the values that are carried over, on their device."""
        device = self._placement.devices[index]
        shape = self.count_steps(group[0], run) * self._placement.replicas, run.size
        if run.count:
            rows = send_rows(group, run.rows, shape, device)
            return (rows, [value.on(index, run) for value in self._carried]) if self._carried else rows
        key = index, self.kind(group[0], run.size)
        if key not in self._idle_batches:
            rows = send_rows(group[:1], range(0), shape, device)
            shapes = (value.shapes(run.size) for value in self._carried)
            zeros = [np.zeros((self._placement.replicas, *shape.shape), shape.dtype) for shape in shapes]
            self._idle_batches[key] = (rows, device_put(zeros, device)) if zeros else rows
        return self._idle_batches[key]

    def read_replica(self, batch: GlobalBatch, run: ReplicaRun) -> PyTree:
        """Return the input of one replica, which `run` consists of, as `shapes` describes it."""
        rows = slice(run.rows.start, run.rows.stop)
        arrays = [np.asarray(leaf.array[rows], leaf.dtype) for leaf in batch.leaves]
        shard = jax.tree.unflatten(batch.structure, arrays)
        return (shard, [value.on(0, run)[0] for value in self._carried]) if self._carried else shard

    def forget(self) -> None:
        """Drop what is kept on the devices from one call to the next."""
        self._idle_batches = {}
