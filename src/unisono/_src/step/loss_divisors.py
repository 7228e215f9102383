"""The loss divisors of a global batch: where shapes decide them, they are known before a device counts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.replica.protocol import Divisor, State
from unisono._src.step.call_inputs import CallInputs
from unisono._src.typed_jax import eval_shape
from unisono._src.typing import AnyArray, PyTree


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


def list_known_divisors(divisors: Sequence[Divisor]) -> list[float | None]:
    """Return each divisor as a number, 0 for a term that has none; None where masks or weights decide."""
    return [0.0 if divisor is None else divisor if isinstance(divisor, float) else None for divisor in divisors]


def sum_divisors(replicas: Sequence[list[float | None]]) -> tuple[float, ...]:
    """Add the divisors of the replicas; a divisor that must be counted on the devices is 0."""
    return tuple(0.0 if None in column else float(sum(d or 0.0 for d in column)) for column in zip(*replicas, strict=True))
