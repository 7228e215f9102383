"""By what replica code divides its losses by itself: what is not the size of the global batch is said once."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from unisono._src.checks.user_code.loss_growth import MEAN, SUM, Part
from unisono._src.checks.user_code.provenance import CLOSE, Argument, Mean, Path
from unisono._src.data.global_batch import GlobalBatch, sizes_of

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
    """Of losses that are one number: the sums over rows in them."""
    vectors: list[tuple[tuple[int, ...], Path]]
    """Of losses that are one number for each example, which the engine divides: (shape, by what the code divides them)."""


class Divisions:
    """Of one function of the user's."""

    def __init__(
        self,
        name: str,
        replicas: int,
        parts: Sequence[Part],
        found: dict[int, Scaled],
        scaled_of: Callable[[int], Scaled] | None,
    ) -> None:
        """`parts` are those of the losses, as they were measured. `scaled_of` looks at the code for so many rows of a replica, `found` is what
        was seen already; None where it tells nothing."""
        self._name = name
        self._replicas = replicas
        self._parts = parts
        self._scaled_of = scaled_of
        self._scaled = found
        self._most_rows = 0
        self._seen: set[object] = set()
        self._warned = False

    @property
    def tells(self) -> bool:
        """Return whether a part of the losses is known not to add up over replicas, which `check` says."""
        return any(part.growth is not None and not adds_up(part, self._replicas) for part in self._parts)

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
        rows, of_replicas = batch.rows, sizes_of(batch, self._replicas)
        sizes = sorted(set(of_replicas) - {0}, reverse=True)
        for part in self._parts:
            yield from self._of_part(
                part, list(products([*known(part.path.divisors, arguments), *part.path.factors])), rows, of_replicas
            )
        for size in sizes if self._scaled_of is not None else []:
            assert self._scaled_of is not None
            if size not in self._scaled:
                self._scaled[size] = self._scaled_of(size)
            means, vectors = self._scaled[size]
            for mean in means:
                yield from self._of_mean(mean, known(mean.divisors, arguments), rows, size)
            for shape, path in vectors:
                yield from self._of_vector(shape, known(path.divisors, arguments), rows)
        for divisor, of_row in fixed:
            if divisor not in (rows, rows * of_row):
                yield self._of_constant(divisor, rows)

    def _of_part(self, part: Part, numbers: list[float], rows: int, sizes: Sequence[int]) -> Iterator[str]:
        """`numbers`: by which the part is divided, and products of them."""
        replicas = self._replicas
        by_replicas = any(is_close(number, replicas) for number in numbers)
        parts = rows / max(sizes)
        if not part.of_rows:
            if not by_replicas and not any(is_close(number, parts) for number in numbers):
                yield (
                    f"The function {self._name!r} adds to its loss, in each of {replicas} replicas, something that does not depend on the "
                    f"rows, as a regularizer: it counts {replicas} times, and so do its gradients. Write un.scale_regularization_loss(...) "
                    f"around it."
                )
        elif part.growth == MEAN and by_replicas and len(set(sizes)) > 1:
            yield (
                f"The function {self._name!r} divides a mean over a replica's rows by {replicas} replicas, and of the {rows} rows of this global "
                f"batch some have {max(sizes)} and others {min(sizes)}: their examples do not weigh the same. {ADVICE}"
            )
        elif part.growth == MEAN and not by_replicas:
            yield (
                f"The function {self._name!r} differentiates a number that stays the same where a replica's rows are taken twice, as a mean over "
                f"them does, and the sum over {replicas} replicas is {parts:.3g} times the mean over the global batch of {rows} rows; so are "
                f"the gradients. {ADVICE}"
            )
        elif part.growth not in (MEAN, SUM, None):
            yield (
                f"The function {self._name!r} differentiates a number that is {part.growth:.3g} times as large where a replica's rows are taken "
                f"twice, neither a mean over them (1) nor a sum (2): what {replicas} replicas add up is not its value on the global batch of "
                f"{rows} rows. {ADVICE}"
            )

    def _of_mean(self, mean: Mean, divisors: list[float], rows: int, size: int) -> Iterator[str]:
        everything = mean.elements * rows / size
        found = list(products([*divisors, *mean.factors]))
        if any(is_close(d, everything) or is_close(d, rows) or is_close(d, self._replicas) for d in found):
            return
        own = [d for d, of in zip(divisors, mean.divisors, strict=True) if not isinstance(of, Argument)]
        named = [d for d in own if d > HALF and not is_close(d, mean.elements) and not is_close(d, size)]
        constants = named + [d for d in (*divisors, *mean.factors) if is_close(d, self._most_rows)]
        if constants:
            yield self._of_constant(max(constants), rows)

    def _of_constant(self, divisor: float, rows: int) -> str:
        return (
            f"The function {self._name!r} divides a sum by {divisor:.6g}, and this global batch has {rows} rows: its examples weigh "
            f"{rows}/{divisor:.6g} of what they do in the mean. {ADVICE}"
        )

    def _of_vector(self, shape: tuple[int, ...], divisors: list[float], rows: int) -> Iterator[str]:
        twice = [d for d in products(divisors) if d > HALF and (is_close(d, rows) or is_close(d, self._most_rows))]
        if twice and not is_close(twice[0], math.prod(shape[1:])):
            yield (
                f"The function {self._name!r} divides the loss of each example by {twice[0]:.0f}, and the engine divides their sum by the "
                f"{rows} rows of this global batch: it is divided twice. Return the losses as they are."
            )


def adds_up(part: Part, replicas: int) -> bool:
    """Return whether a part of a loss is one over replicas, as far as its growth tells: a sum, or a mean that is divided by their number."""
    by = [d for d in (*part.path.divisors, *part.path.factors) if not isinstance(d, Argument)]
    return part.growth == SUM or (part.growth == MEAN and any(is_close(d, replicas) for d in products(by)))


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
