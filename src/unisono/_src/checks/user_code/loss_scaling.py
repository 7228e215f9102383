"""Divisors that replica code divides its losses by: one that is not the size of the global batch is warned of once."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from unisono._src.checks.user_code.loss_growth import MEAN, SUM, LossPart
from unisono._src.checks.user_code.provenance import CLOSE, NumberArgument, RowSum, Scaling
from unisono._src.data.global_batch import GlobalBatch, count_shard_rows
from unisono._src.typing import Shape

MOST_BATCHES = 64
"""Kinds of batches to look at: where this many have no fault, the others have none."""
ADVICE = (
    "If that is not meant, return the loss of each example from the function given to un.value_and_grad, or write "
    "un.compute_average_loss(losses) without global_batch_size: both divide by the rows that there are."
)
HALF = 2
"""A sum that is divided by two may be meant as a sum."""


class LossScaling(NamedTuple):
    """Scaling of the losses by replica code itself, on some number of a replica's rows."""

    means: list[RowSum]
    """The sums over rows in losses that are one number."""
    vectors: list[tuple[Shape, Scaling]]
    """The shapes of losses that are one number for each example, and what the code divides them by before the engine divides."""


class DivisorCheck:
    """The check of the divisors in one user function."""

    def __init__(
        self,
        name: str,
        replicas: int,
        parts: Sequence[LossPart],
        observed: dict[int, LossScaling],
        scaled_of: Callable[[int], LossScaling] | None,
    ) -> None:
        """Keep what the check needs.

        `parts` are the measured parts of the losses. `scaled_of` looks at the code for a number of rows of a replica; None where it would tell
        nothing. `observed` holds what is known already, by the number of rows.
        """
        self._name = name
        self._replicas = replicas
        self._parts = parts
        self._scaled_of = scaled_of
        self._scaled = observed
        self._most_rows = 0
        self._seen: set[object] = set()
        self._warned = False

    @property
    def has_fault(self) -> bool:
        """Return whether a part of the losses is known not to add up over replicas, which `check` warns of."""
        return any(part.growth is not None and not is_additive(part, self._replicas) for part in self._parts)

    def check(self, batch: GlobalBatch, fixed: Sequence[tuple[float, int]], arguments: Sequence[float | None]) -> None:
        """Warn once of a divisor that is not the size of this global batch.

        `fixed` are the divisors that the code names, each with the number of values of a row. `arguments` are the numbers that the code gets;
        None for a number that only a device knows.
        """
        rows = batch.rows
        self._most_rows = max(self._most_rows, batch.rows)
        key = rows, batch.sizes, self._most_rows, tuple(arguments)
        if self._warned or key in self._seen or len(self._seen) == MOST_BATCHES:
            return
        self._seen.add(key)
        fault = next(self._find_faults(batch, fixed, arguments), None)
        if fault is not None:
            self._warned = True
            warnings.warn(fault, stacklevel=5)

    def _find_faults(
        self, batch: GlobalBatch, fixed: Sequence[tuple[float, int]], arguments: Sequence[float | None]
    ) -> Iterator[str]:
        rows = batch.rows
        rows_of_replicas = count_shard_rows(batch, self._replicas)
        sizes = sorted(set(rows_of_replicas) - {0}, reverse=True)
        for part in self._parts:
            yield from self._judge_part(
                part,
                list(list_products([*resolve_divisors(part.path.divisors, arguments), *part.path.factors])),
                rows,
                rows_of_replicas,
            )
        for size in sizes if self._scaled_of is not None else []:
            assert self._scaled_of is not None
            if size not in self._scaled:
                self._scaled[size] = self._scaled_of(size)
            means, vectors = self._scaled[size]
            for mean in means:
                yield from self._judge_mean(mean, resolve_divisors(mean.divisors, arguments), rows, size)
            for shape, path in vectors:
                yield from self._judge_vector(shape, resolve_divisors(path.divisors, arguments), rows)
        for divisor, values_per_row in fixed:
            if divisor not in (rows, rows * values_per_row):
                yield self._describe_constant(divisor, rows)

    def _judge_part(self, part: LossPart, numbers: list[float], rows: int, sizes: Sequence[int]) -> Iterator[str]:
        """Yield the fault of a part. `numbers` are the numbers that it is divided by, and products of them."""
        replicas = self._replicas
        by_replicas = any(is_near_number(number, replicas) for number in numbers)
        parts = rows / max(sizes)
        if not part.of_rows:
            if not by_replicas and not any(is_near_number(number, parts) for number in numbers):
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

    def _judge_mean(self, mean: RowSum, divisors: list[float], rows: int, size: int) -> Iterator[str]:
        everything = mean.elements * rows / size
        combined = list(list_products([*divisors, *mean.factors]))
        if any(
            is_near_number(divisor, everything) or is_near_number(divisor, rows) or is_near_number(divisor, self._replicas)
            for divisor in combined
        ):
            return
        fixed = [
            divisor for divisor, origin in zip(divisors, mean.divisors, strict=True) if not isinstance(origin, NumberArgument)
        ]
        named = [
            divisor
            for divisor in fixed
            if divisor > HALF and not is_near_number(divisor, mean.elements) and not is_near_number(divisor, size)
        ]
        constants = named + [divisor for divisor in (*divisors, *mean.factors) if is_near_number(divisor, self._most_rows)]
        if constants:
            yield self._describe_constant(max(constants), rows)

    def _describe_constant(self, divisor: float, rows: int) -> str:
        return (
            f"The function {self._name!r} divides a sum by {divisor:.6g}, and this global batch has {rows} rows: its examples weigh "
            f"{rows}/{divisor:.6g} of what they do in the mean. {ADVICE}"
        )

    def _judge_vector(self, shape: Shape, divisors: list[float], rows: int) -> Iterator[str]:
        twice = [
            divisor
            for divisor in list_products(divisors)
            if divisor > HALF and (is_near_number(divisor, rows) or is_near_number(divisor, self._most_rows))
        ]
        if twice and not is_near_number(twice[0], math.prod(shape[1:])):
            yield (
                f"The function {self._name!r} divides the loss of each example by {twice[0]:.0f}, and the engine divides their sum by the "
                f"{rows} rows of this global batch: it is divided twice. Return the losses as they are."
            )


def is_additive(part: LossPart, replicas: int) -> bool:
    """Return whether a part of a loss adds up over replicas, as far as its growth tells: a sum, or a mean divided by their number."""
    numbers = [divisor for divisor in (*part.path.divisors, *part.path.factors) if not isinstance(divisor, NumberArgument)]
    return part.growth == SUM or (
        part.growth == MEAN and any(is_near_number(divisor, replicas) for divisor in list_products(numbers))
    )


def resolve_divisors(divisors: Iterable[float | NumberArgument], arguments: Sequence[float | None]) -> list[float]:
    """Return the divisors as numbers, with arguments in their places; 1 for a number that only a device knows."""
    numbers = [arguments[divisor.position] if isinstance(divisor, NumberArgument) else divisor for divisor in divisors]
    return [1.0 if divisor is None else divisor for divisor in numbers]


def list_products(numbers: Sequence[float]) -> Iterable[float]:
    """Return the products of some of the numbers: a mean may be halved, or weighted, beside being divided."""
    first = numbers[:6]
    return (math.prod(chosen) for count in range(1, len(first) + 1) for chosen in itertools.combinations(first, count))


def is_near_number(number: float, other: float) -> bool:
    return math.isclose(number, other, rel_tol=CLOSE)
