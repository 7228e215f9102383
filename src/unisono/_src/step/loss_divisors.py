"""By what the loss terms of a global batch are divided, as far as shapes decide."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np


class Divisors:
    """What a replica adds to the divisor of each loss term: a number, or None where masks or weights decide on the devices."""

    def __init__(self, divisors: Callable[..., Sequence[Any]]) -> None:
        self._divisors = divisors
        self._found: dict[Hashable, list[float | None]] = {}

    def of(self, kind: Hashable, arguments: Callable[[], tuple[Any, ...]]) -> list[float | None]:
        """Of a replica's rows of this kind; `arguments` are asked for where it is a new one: (state, rows, constants), in shapes."""
        if kind not in self._found:

            def look(state: Any, rows: Any, constants: Any) -> None:
                found = self._divisors(state, rows, np.int32(0), np.float32(1), constants)
                self._found[kind] = [0.0 if d is None else d if isinstance(d, float) else None for d in found]

            jax.eval_shape(look, *arguments())
        return self._found[kind]


def summed(replicas: Sequence[list[float | None]]) -> tuple[float, ...]:
    """Over the replicas; 0 where it must be counted."""
    return tuple(0.0 if None in column else float(sum(d or 0.0 for d in column)) for column in zip(*replicas, strict=True))
