"""The loss divisors of a global batch: where shapes decide them, they are known before a device counts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.packing import PackedTree
from unisono._src.replica.protocol import Divisor, State
from unisono._src.step.call_inputs import CallInputs
from unisono._src.typed_jax import device_put, eval_shape
from unisono._src.typing import AnyArray, Array, PyTree


class BatchDivisors(NamedTuple):
    """The loss divisors of a global batch."""

    are_counted: bool
    """Whether masks or weights decide some of them, on the devices."""
    on_devices: dict[int, Array]
    """The divisors on each device: as far as shapes decide them, and from `complete` on all."""

    def complete(self, totals: dict[int, PackedTree], devices: Sequence[jax.Device]) -> BatchDivisors:
        """Return the divisors that were counted, on every device, from their total on the homes."""
        vectors = {home: total["float32"] for home, total in totals.items()}
        return self._replace(
            on_devices={
                index: vectors[index] if index in vectors else device_put(vectors[0], device)
                for index, device in enumerate(devices)
            }
        )


class DivisorCache:
    """The cached divisors of each loss term of a replica: a number, or None where masks or weights decide on the devices."""

    def __init__(self, divisors: Callable[..., Sequence[Divisor]], inputs: CallInputs) -> None:
        """`divisors` is that of `ReplicaComputation`."""
        self._divisors = divisors
        self._inputs = inputs
        self._cache: dict[Hashable, list[float | None]] = {}

    def of(self, batch: GlobalBatch, rows: int, state: State) -> list[float | None]:
        """Return the divisors of a replica with this number of rows of a batch. They depend on shapes alone, also on those of the state."""
        kind = self._inputs.kind(batch, rows)
        if kind not in self._cache:

            def store_divisors(state: State, rows: PyTree, constants: Sequence[AnyArray]) -> None:
                self._cache[kind] = list_known_divisors(self._divisors(state, rows, np.int32(0), np.float32(1), constants))

            eval_shape(store_divisors, state, self._inputs.shapes(batch, rows), self._inputs.constants())
        return self._cache[kind]

    def place(self, batch: GlobalBatch, sizes: Sequence[int], state: State, devices: Iterable[int]) -> BatchDivisors:
        """Return the divisors of a batch whose replicas have these numbers of rows, as far as shapes decide them, on these devices."""
        by_size = {size: self.of(batch, size, state) for size in set(sizes)}
        sums = sum_divisors([by_size[size] for size in sizes])
        on_devices = {index: self._inputs.send_numbers(index, np.float32, sums) for index in devices}
        return BatchDivisors(any(None in divisors for divisors in by_size.values()), on_devices)


def list_known_divisors(divisors: Sequence[Divisor]) -> list[float | None]:
    """Return each divisor as a number, 0 for a term that has none; None where masks or weights decide."""
    return [0.0 if divisor is None else divisor if isinstance(divisor, float) else None for divisor in divisors]


def sum_divisors(replicas: Sequence[list[float | None]]) -> tuple[float, ...]:
    """Add the divisors of the replicas; a divisor that must be counted on the devices is 0."""
    return tuple(0.0 if None in column else float(sum(d or 0.0 for d in column)) for column in zip(*replicas, strict=True))
