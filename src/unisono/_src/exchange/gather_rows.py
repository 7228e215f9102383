"""Rows that the processes have computed, put together on each of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono._src.exchange.collectives import piece
from unisono._src.placement import Placement
from unisono._src.processes.progress import current


@functools.cache
def rows_of_all(placement: Placement) -> RowsOfAll:
    """One for each placement, which keeps its compiled programs."""
    return RowsOfAll(placement)


class RowsOfAll:
    """`rows(arrays, counts)`: called by every process with its rows, returns those of all, in the order of the processes."""

    def __init__(self, placement: Placement) -> None:
        assert placement.processes is not None
        self._lead = placement.lead
        self._mesh = Mesh(np.array(placement.processes.leads), ("processes",))
        self._gather = jax.jit(lambda arrays: arrays, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    def __call__(self, arrays: Sequence[jax.Array], counts: Sequence[Sequence[int]]) -> list[jax.Array]:
        """`counts` are, for each array, the rows of each process. The arrays lie on the lead."""
        most = [max(of) for of in counts]
        filled = [
            jnp.pad(array, [(0, rows - array.shape[0]), *[(0, 0)] * (array.ndim - 1)])
            for array, rows in zip(arrays, most, strict=True)
        ]
        # As in the sums: on CPU nothing else may be in flight.
        with current().busy("computing"):
            filled = jax.block_until_ready(filled)
        with current().waiting("for the rows of all"):
            everywhere = jax.block_until_ready(self._gather([self._global(array) for array in filled]))
        found = [piece(array, self._lead) for array in everywhere]
        return [
            jnp.concatenate([array[number * rows : number * rows + count] for number, count in enumerate(of)])
            for array, rows, of in zip(found, most, counts, strict=True)
        ]

    def of_first(self, array: jax.Array) -> jax.Array:
        """The array of process 0, of as many rows everywhere."""
        rows = array.shape[0]
        return self([array], [[rows] + [0] * (self._mesh.size - 1)])[0]

    def _global(self, array: jax.Array) -> jax.Array:
        shape = len(self._mesh.devices) * array.shape[0], *array.shape[1:]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self._mesh, PartitionSpec("processes")), [array])
