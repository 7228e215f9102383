"""By what replica code divides its losses by itself: what is not the size of the global batch is said once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from unisono.data.division import GlobalBatch, sizes_of
from unisono.loop.evidence import Mean

CLOSE = 1e-4


class Divisions:
    """Of one function of the user's."""

    def __init__(self, name: str, replicas: int, means_of: Callable[[int], list[Mean]] | None) -> None:
        """`means_of` gives, for a replica's rows, the means that the code takes by itself; None where it leaves that to the engine."""
        self._name = name
        self._replicas = replicas
        self._means_of = means_of
        self._means: dict[int, list[Mean]] = {}
        self._most_rows = 0
        self._seen: set[Any] = set()
        self._warned = False

    def check(self, batch: GlobalBatch, fixed: Sequence[float]) -> None:
        """`fixed` are the divisors that the code names."""
        rows, self._most_rows = batch.rows, max(self._most_rows, batch.rows)
        key = rows, batch.sizes, self._most_rows
        if self._warned or key in self._seen:
            return
        self._seen.add(key)
        if self._means_of is not None:
            for size in sorted(set(sizes_of(batch, self._replicas)) - {0}, reverse=True):
                if size not in self._means:
                    self._means[size] = self._means_of(size)
                for mean in self._means[size]:
                    self._check(mean, rows, size)
        for divisor in fixed:
            if divisor != rows:
                self._warn_of_constant(divisor, rows)

    def _check(self, mean: Mean, rows: int, size: int) -> None:
        everything = mean.elements * rows / size
        if (not mean.divisors and not mean.factors) or is_close(mean.divisor, everything) or is_close(mean.divisor, rows):
            return
        of_replica = [d for d in mean.divisors if is_close(d, mean.elements) or is_close(d, size)]
        if self._replicas > 1 and of_replica:
            self._warn(
                f"The function {self._name!r} divides a sum by {of_replica[0]:.0f}, as many as one replica has, and the sum over "
                f"{self._replicas} replicas is {everything / mean.divisor:.3g} times the mean over the global batch of {rows} rows; so are "
                f"the gradients."
            )
            return
        constants = [d for d in (*mean.divisors, *mean.factors, mean.divisor) if is_close(d, self._most_rows)]
        if constants and self._most_rows != rows:
            self._warn_of_constant(constants[0], rows)

    def _warn_of_constant(self, divisor: float, rows: int) -> None:
        self._warn(
            f"The function {self._name!r} divides a sum by {divisor:.0f}, and this global batch has {rows} rows: its examples weigh "
            f"{rows}/{divisor:.0f} of what those of other batches do."
        )

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{what} If that is not meant, return the loss of each example from the function given to un.value_and_grad, or write "
                f"un.compute_average_loss(losses) without global_batch_size: both divide by the rows that there are.",
                stacklevel=8,
            )


def is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=CLOSE)
