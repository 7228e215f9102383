"""The inputs of the step program beside the device state.

These are rows, values of an earlier step, constants and orders, on the devices.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.global_batch import IN_PLACE_BYTES, GlobalBatch, describe_rows, send_rows
from unisono._src.engine.step.plan import ReplicaRun, Round
from unisono._src.engine.step.run_outputs import CarriedValue, describe_replica_batch
from unisono._src.placement import Placement
from unisono._src.typing import AnyArray, Array, PyTree, Shape

Whole: TypeAlias = int | Array
"""A whole number; a tracer inside of the program."""


class CallOrders(NamedTuple):
    """The orders for a step of a call; whole numbers."""

    steps: Whole = 1
    """The number of steps of the call, in the orders for the first."""
    since: Whole = 0
    """The step of the call whose rows come first."""
    first: Whole = 0
    """The first replica that is run."""
    replicas: Whole = 0
    """The number of replicas that are run."""
    before: Whole = 0
    """The number of replicas that were added to the same sum already."""
    place: Whole = 0
    """The position of the first replica among those with rows."""
    row: Whole = 0
    """Its first row."""
    phase: Whole = 0
    """The first phase that is run."""
    end: Whole = 0
    """The first phase after it that is not run."""
    summing: Whole = 0
    """1 if the running sums are complete after these replicas."""
    finishing: Whole = 0
    """1 if the sums are totals over all replicas. The step ends then."""
    group: Whole = 0
    """The devices that add up inside of the call: a number of `DeviceGroups`, or 0 if their sums are not added there."""
    device: Whole = 0
    """Which of these devices this one is."""


NOTHING = CallOrders()
END = CallOrders(finishing=1)

Orders: TypeAlias = tuple[tuple[CallOrders, ...], ...]
"""The orders for a call, of each device. There is an item for the first step, and another for all that follow if it differs."""


CALL_BYTES = 2 * IN_PLACE_BYTES  # so that rows which are read in place are those of one step

MOST_ORDERS = 4096
"""How many orders are kept on the devices."""


class CallInputs:
    """The inputs of calls of the step program. A device that runs no replica gets arrays of the same shapes, whose values are not read."""

    def __init__(self, placement: Placement, most_steps: int) -> None:
        """Prepare inputs for calls of at most `most_steps` steps. A call has room for the batches of all of them."""
        self._mesh = get_mesh(placement.devices)
        self._replicas = placement.replicas
        self._most_steps = most_steps
        self._orders: dict[Hashable, Array] = {}
        """Orders of calls, on the devices: one transfer for each, not one a step."""
        self._constants: list[AnyArray] = []
        self._constants_on_mesh: list[AnyArray] | None = None
        self._carried: Sequence[CarriedValue] = ()
        self._idle_batches: dict[Hashable, PyTree] = {}
        """Batches for calls that run no replica, by kind of rows."""

    def keep(self, constants: Sequence[AnyArray], carried: Sequence[CarriedValue]) -> None:
        """Set the constants and the carried values of the next steps. Carried values are outputs of an earlier step."""
        self._constants = list(constants)
        self._constants_on_mesh = None
        self._carried = carried

    @property
    def has_carried(self) -> bool:
        """Whether values of an earlier step are carried over."""
        return bool(self._carried)

    @property
    def constants(self) -> list[AnyArray]:
        """The constants, as they were given."""
        return self._constants

    def send_constants(self) -> list[AnyArray]:
        """Send the constants to the devices, once."""
        if self._constants_on_mesh is None:
            is_there = self._mesh.size == 1 or not self._constants
            self._constants_on_mesh = self._constants if is_there else list(self._mesh.put_everywhere(self._constants))
        return self._constants_on_mesh

    def shapes(self, batch: GlobalBatch, rows: int) -> PyTree:
        """Describe a replica's input in shapes, for this number of rows."""
        return describe_replica_batch(batch, self._carried, rows)

    def kind(self, batch: GlobalBatch, rows: int) -> Hashable:
        """Build a cache key of a replica's input. Programs depend on nothing else of an input with this number of rows."""
        if not self._carried:
            return rows, batch.signature
        shapes = [value.shapes(rows) for value in self._carried]
        return rows, batch.signature, tuple((shape.shape, str(shape.dtype)) for shape in shapes)

    def count_steps(self, batch: GlobalBatch, size: int) -> int:
        """Count the steps of one call, for replicas of this size.

        It depends on shapes alone, since the program has room for these steps.
        """
        bytes_of_step = size * self._replicas * batch.row_bytes
        return max(1, min(self._most_steps, CALL_BYTES // max(1, bytes_of_step)))

    def send_orders(self, orders: Orders) -> Array:
        """Send the orders of a call to the devices. Each device has orders for the first step and for all others."""
        if orders not in self._orders:
            if len(self._orders) >= MOST_ORDERS:  # every batch has another size
                self._orders.clear()
            # Always two rows, for the first step and for all others: one shape, and so one program.
            self._orders[orders] = self._mesh.put_blocks([np.array((each[0], each[-1]), np.int32) for each in orders])
        return self._orders[orders]

    def describe_room(self, batch: GlobalBatch, size: int) -> Shape:
        """Compute the leading axes of a device's rows in a call. `size` is the number of rows of a replica."""
        return self.count_steps(batch, size) * self._replicas, size

    def describe(self, batch: GlobalBatch, size: int) -> tuple[PyTree, PyTree, PyTree]:
        """Describe in shapes orders, constants and rows of a call, for replicas of this size. There are no carried values."""
        orders = self._mesh.describe_blocks((2, len(CallOrders._fields)), np.int32)
        constants = [self._mesh.describe_everywhere(array.shape, array.dtype) for array in self._constants]
        return orders, constants, describe_rows(batch, self.describe_room(batch, size), self._mesh)

    def send_batches(self, group: Sequence[GlobalBatch], round_: Round) -> PyTree:
        """Send the rows and the carried values of replicas to their devices."""
        if not any(round_.runs):
            return self._send_nothing(group[0], round_.size)
        rows = send_rows(group, round_.rows, self.describe_room(group[0], round_.size), self._mesh)
        return (rows, [value.on(round_.runs) for value in self._carried]) if self._carried else rows

    def _send_nothing(self, batch: GlobalBatch, size: int) -> PyTree:
        key = self.kind(batch, size)
        if key not in self._idle_batches:
            rows = send_rows([batch], (range(0),) * self._mesh.size, self.describe_room(batch, size), self._mesh)
            shapes = [value.shapes(size) for value in self._carried]
            zeros = [np.zeros((self._replicas, *shape.shape), shape.dtype) for shape in shapes]
            values = [self._mesh.put_blocks([block] * self._mesh.size) for block in zeros]
            self._idle_batches[key] = (rows, values) if values else rows
        return self._idle_batches[key]

    def read_replica(self, batch: GlobalBatch, run: ReplicaRun) -> PyTree:
        """Read the input of one replica, as `shapes` describes it. `run` has this replica alone."""
        rows = slice(run.rows.start, run.rows.stop)
        arrays = [np.asarray(leaf.array[rows], leaf.dtype) for leaf in batch.leaves]
        shard = jax.tree.unflatten(batch.structure, arrays)
        return (shard, [value.own[run.first] for value in self._carried]) if self._carried else shard

    def forget(self) -> None:
        """Drop the idle batches that are kept on the devices."""
        self._idle_batches = {}
