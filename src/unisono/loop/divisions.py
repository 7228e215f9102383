"""By what replica code divides its losses by itself: what is not the size of the global batch is said once."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from unisono.data.division import GlobalBatch, sizes_of
from unisono.loop.evidence import CLOSE, Argument, Mean, Path, Whole

MOST_BATCHES = 64
"""Kinds of batches to look at: of so many without a fault, the others have none."""
ADVICE = (
    "If that is not meant, return the loss of each example from the function given to un.value_and_grad, or write "
    "un.compute_average_loss(losses) without global_batch_size: both divide by the rows that there are."
)
HALF = 2
"""A sum that is divided by two may be meant as a sum."""


class Scaled(NamedTuple):
    """What replica code makes of a loss by itself, on a replica's rows of some number."""

    means: list[Mean]
    """Of losses that are one number."""
    wholes: list[Whole]
    vectors: list[tuple[tuple[int, ...], Path]]
    """Of losses that are one number for each example, which the engine divides: (shape, by what the code divides them)."""


class Divisions:
    """Of one function of the user's."""

    def __init__(self, name: str, replicas: int, found: dict[int, Scaled], scaled_of: Callable[[int], Scaled] | None) -> None:
        """`scaled_of` looks at the code for so many rows of a replica, `found` is what was seen already; None where it tells
        nothing."""
        self._name = name
        self._replicas = replicas
        self._scaled_of = scaled_of
        self._scaled = found
        self._most_rows = 0
        self._seen: set[object] = set()
        self._warned = False

    def check(self, batch: GlobalBatch, fixed: Sequence[tuple[float, int]], arguments: Sequence[float | None]) -> None:
        """`fixed` are the divisors that the code names, each with how many values there are of a row, `arguments` the numbers that it is
        given; None for what only a device knows."""
        rows, self._most_rows = batch.rows, max(self._most_rows, batch.rows)
        key = rows, batch.sizes, self._most_rows, tuple(arguments)
        if self._warned or key in self._seen or len(self._seen) == MOST_BATCHES:
            return
        self._seen.add(key)
        fault = next(self._faults(batch, fixed, arguments), None)
        if fault is not None:
            self._warned = True
            warnings.warn(fault, stacklevel=5)

    def _faults(self, batch: GlobalBatch, fixed: Sequence[tuple[float, int]], arguments: Sequence[float | None]) -> Iterator[str]:
        rows = batch.rows
        sizes = sorted(set(sizes_of(batch, self._replicas)) - {0}, reverse=True) if self._scaled_of is not None else []
        for size in sizes:
            assert self._scaled_of is not None
            if size not in self._scaled:
                self._scaled[size] = self._scaled_of(size)
            means, wholes, vectors = self._scaled[size]
            for mean in means:
                yield from self._of_mean(mean, known(mean.divisors, arguments), rows, size)
            for whole in wholes:
                yield from self._of_whole([*known(whole.divisors, arguments), *whole.factors], rows / size)
            for shape, path in vectors:
                yield from self._of_vector(shape, known(path.divisors, arguments), rows)
        for divisor, of_row in fixed:
            if divisor not in (rows, rows * of_row):
                yield self._of_constant(divisor, rows)

    def _of_mean(self, mean: Mean, divisors: list[float], rows: int, size: int) -> Iterator[str]:
        everything = mean.elements * rows / size
        found = list(products([*divisors, *mean.factors]))
        if any(is_close(d, everything) or is_close(d, rows) for d in found):
            return
        of_replica = [d for d in divisors if is_close(d, mean.elements) or is_close(d, size)]
        own = [d for d, of in zip(divisors, mean.divisors, strict=True) if not isinstance(of, Argument)]
        by_replicas = self._replicas > 1 and any(is_close(d, self._replicas) for d in found)
        constants = [d for d in own if d > HALF] + [d for d in (*divisors, *mean.factors) if is_close(d, self._most_rows)]
        if self._replicas > 1 and mean.of_replica and not by_replicas:
            yield (
                f"The function {self._name!r} divides a sum by one over the rows of a replica, as a weighted mean does, and the means of "
                f"{self._replicas} replicas are added: their sum is about {self._replicas} times the mean over the global batch; so are "
                f"the gradients. {ADVICE}"
            )
        elif self._replicas > 1 and of_replica and not by_replicas:
            yield (
                f"The function {self._name!r} divides a sum by {of_replica[0]:.0f}, as many as one replica has, and the sum over "
                f"{self._replicas} replicas is {rows / size:.3g} times the mean over the global batch of {rows} rows; so are the "
                f"gradients. {ADVICE}"
            )
        elif constants and not by_replicas:
            yield self._of_constant(max(constants), rows)

    def _of_constant(self, divisor: float, rows: int) -> str:
        return (
            f"The function {self._name!r} divides a sum by {divisor:.6g}, and this global batch has {rows} rows: its examples weigh "
            f"{rows}/{divisor:.6g} of what they do in the mean. {ADVICE}"
        )

    def _of_whole(self, divisors: list[float], parts: float) -> Iterator[str]:
        """`parts`: as how many replicas of this size the global batch has rows."""
        if self._replicas > 1 and not any(is_close(d, self._replicas) or is_close(d, parts) for d in products(divisors)):
            yield (
                f"The function {self._name!r} adds to its loss, in each of {self._replicas} replicas, something that does not depend on "
                f"the rows, as a regularizer: it counts {self._replicas} times, and so do its gradients. Write "
                f"un.scale_regularization_loss(...) around it."
            )

    def _of_vector(self, shape: tuple[int, ...], divisors: list[float], rows: int) -> Iterator[str]:
        twice = [d for d in products(divisors) if d > HALF and (is_close(d, rows) or is_close(d, self._most_rows))]
        if twice and not is_close(twice[0], math.prod(shape[1:])):
            yield (
                f"The function {self._name!r} divides the loss of each example by {twice[0]:.0f}, and the engine divides their sum by the "
                f"{rows} rows of this global batch: it is divided twice. Return the losses as they are."
            )


def known(divisors: Iterable[float | Argument], arguments: Sequence[float | None]) -> list[float]:
    """The numbers, those that the code is given among them; 1 for those that only a device knows."""
    found = [arguments[d.position] if isinstance(d, Argument) else d for d in divisors]
    return [1.0 if d is None else d for d in found]


def products(numbers: Sequence[float]) -> Iterable[float]:
    """Of some of the numbers: a mean may be halved, or weighted, beside being divided."""
    some = numbers[:6]
    return (math.prod(part) for count in range(1, len(some) + 1) for part in itertools.combinations(some, count))


def is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=CLOSE)
