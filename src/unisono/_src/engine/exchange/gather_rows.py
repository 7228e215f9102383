"""Rows of all processes, gathered on each of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono._src.engine.exchange.collectives import find_own_data
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.typed_jax import block_until_ready, jit, pad
from unisono._src.typing import Array


@functools.cache
def get_row_gatherer(placement: Placement) -> RowGatherer:
    """Get the gatherer of a placement. There is one for each, since it keeps compiled programs."""
    return RowGatherer(placement)


class RowGatherer:
    """Gathers the rows of all processes on each of them.

    Every process calls it with its own rows. The rows come in the order of the processes.
    """

    def __init__(self, placement: Placement) -> None:
        assert placement.processes is not None
        self._lead = placement.lead
        self._mesh = Mesh(np.array(placement.processes.leads), ("processes",))
        self._gather = jit(lambda arrays: arrays, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    def __call__(self, arrays: Sequence[Array], counts: Sequence[Sequence[int]]) -> list[Array]:
        """Gather the rows of all processes, for each array.

        `counts` are the rows of each process, for each array.

        The arrays lie on the lead.
        """
        lengths = [max(process_counts) for process_counts in counts]
        padded = [
            pad(array, [(0, length - array.shape[0]), *[(0, 0)] * (array.ndim - 1)])
            for array, length in zip(arrays, lengths, strict=True)
        ]
        # As in the sums: on CPU nothing else may be in flight.
        with get_activity().report_busy("computing"):
            padded = block_until_ready(padded)
        with get_activity().report_waiting("for the rows of all"):
            everywhere = block_until_ready(self._gather([self._global(array) for array in padded]))
        gathered = [find_own_data(array) for array in everywhere]
        return [
            jnp.concatenate([array[process * length : process * length + count] for process, count in enumerate(process_counts)])
            for array, length, process_counts in zip(gathered, lengths, counts, strict=True)
        ]

    def of_first(self, array: Array) -> Array:
        """Take the array of process 0. The arrays of all processes have the same shape."""
        rows = array.shape[0]
        return self([array], [[rows] + [0] * (self._mesh.size - 1)])[0]

    def _global(self, array: Array) -> Array:
        """Join our `array` with those of the other processes. Nothing is sent."""
        shape = len(self._mesh.devices) * array.shape[0], *array.shape[1:]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self._mesh, PartitionSpec("processes")), [array])
