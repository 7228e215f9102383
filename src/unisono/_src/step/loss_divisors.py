"""The loss divisors of a global batch, as far as shapes decide them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from unisono._src.replica.protocol import Divisor, State
from unisono._src.typed_jax import eval_shape
from unisono._src.typing import AnyArray, PyTree


class DivisorCache:
    """The cached divisors of each loss term of a replica: a number, or None where masks or weights decide on the devices."""

    def __init__(self, divisors: Callable[..., Sequence[Divisor]]) -> None:
        """`divisors` is that of `ReplicaComputation`."""
        self._divisors = divisors
        self._cache: dict[Hashable, list[float | None]] = {}

    def of(self, kind: Hashable, arguments: Callable[[], tuple[State, PyTree, Sequence[AnyArray]]]) -> list[float | None]:
        """Return the divisors for a kind of rows; `arguments` are read for a new kind: (state, rows, constants), in shapes."""
        if kind not in self._cache:

            def store_divisors(state: State, rows: PyTree, constants: Sequence[AnyArray]) -> None:
                divisors = self._divisors(state, rows, np.int32(0), np.float32(1), constants)
                self._cache[kind] = [0.0 if d is None else d if isinstance(d, float) else None for d in divisors]

            eval_shape(store_divisors, *arguments())
        return self._cache[kind]


def sum_divisors(replicas: Sequence[list[float | None]]) -> tuple[float, ...]:
    """Add the divisors of the replicas; a divisor that must be counted on the devices is 0."""
    return tuple(0.0 if None in column else float(sum(d or 0.0 for d in column)) for column in zip(*replicas, strict=True))
