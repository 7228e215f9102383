"""Check the divisors of losses in replica code.

One that is not the size of the global batch is warned of once.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from unisono._src.engine.global_batch import GlobalBatch, count_shard_rows
from unisono._src.keras.checks.user_code.loss_growth import MEAN, SUM, LossPart
from unisono._src.keras.checks.user_code.provenance import CLOSE, NumberArgument, Provenance, Scaling
from unisono._src.programs.operands import get_shape
from unisono._src.typing import Shape

MOST_BATCHES = 64
"""The most kinds of batches to look at. If so many have no fault, the others have none."""
ADVICE = (
    "If that is not meant, return the loss of each example from the function given to un.value_and_grad, or write "
    "un.compute_average_loss(losses) without global_batch_size: both divide by the rows that there are."
)
HALF = 2
"""A sum that is divided by two may be meant as a sum."""


class VectorLoss(NamedTuple):
    """A loss that is one number for each example."""

    shape: Shape
    scaling: Scaling
    """The constants that the code divides it by before the engine divides."""


def find_vector_losses(sources: Provenance) -> list[VectorLoss]:
    vectors = [*sources.list_noted("vector"), *sources.list_noted("divided")]
    return [VectorLoss(get_shape(vector), sources.scaling(vector)) for vector in vectors]


class DivisorCheck:
    """The check of the divisors in one user function."""

    def __init__(
        self,
        name: str,
        replicas: int,
        parts: Sequence[LossPart] = (),
        vectors: Sequence[VectorLoss] = (),
        means: Sequence[Scaling] = (),
        gradients: Collection[Scaling] = (),
    ) -> None:
        """Keep what is known of the function's losses.

        Args:
            name: The name of the function.
            replicas: R.
            parts: The measured parts of losses.
            vectors: The losses of examples.
            means: What means over the global batch are divided by.
            gradients: What the code divides gradients by.
        """
        self._name = name
        self._replicas = replicas
        self._parts = parts
        self._vectors = vectors
        self._means = means
        self._gradients = gradients
        self._most_rows = 0
        self._seen: set[object] = set()
        self._warned = False

    def check(self, batch: GlobalBatch, fixed: Sequence[tuple[float, int]], arguments: Sequence[float | None]) -> None:
        """Warn once of a divisor that is not this global batch's size.

        Args:
            batch: The global batch.
            fixed: The divisors that the code names, each with the number of values of a row.
            arguments: The numbers that the code gets; None for a number that only a device knows.
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
        sizes = count_shard_rows(batch, self._replicas)
        for part in self._parts:
            divisors = resolve_divisors(part.path.divisors, arguments)
            numbers = list(list_products([*divisors, *part.path.factors]))
            if self._replicas > 1:
                yield from self._judge_growth(part, numbers, rows, sizes)
                yield from self._judge_sum(part, divisors, rows)
            if part.values_per_row and part.growth != MEAN:
                yield from self._judge_constants(part, divisors, numbers, rows)
        for shape, scaling in self._vectors:
            yield from self._judge_vector(shape, resolve_divisors(scaling.divisors, arguments), rows)
        for scaling in self._means:
            yield from self._judge_mean(resolve_divisors(scaling.divisors, arguments))
        for scaling in self._gradients if self._vectors or self._means else ():
            yield from self._judge_gradients([*resolve_divisors(scaling.divisors, arguments), *scaling.factors])
        for divisor, values_per_row in fixed:
            if divisor not in (rows, rows * values_per_row):
                yield self._describe_constant(divisor, rows)

    def _judge_growth(self, part: LossPart, numbers: list[float], rows: int, sizes: Sequence[int]) -> Iterator[str]:
        """Yield the fault of a part that replicas cannot add up.

        `numbers` are the numbers that it is divided by, and products of them.
        """
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

    def _judge_sum(self, part: LossPart, divisors: Sequence[float], rows: int) -> Iterator[str]:
        """Yield the fault of a sum divided by examples and by replicas. The examples are those of the global batch."""
        values = part.values_per_row
        position = next((index for index, number in enumerate(divisors) if is_near_number(number, self._replicas)), None)
        may_be_values = values % self._replicas == 0  # a mean over the values of a row; 0 if they are not known
        if part.growth != SUM or self._replicas == HALF or position is None or may_be_values:
            return
        others = list(list_products([*divisors[:position], *divisors[position + 1 :]]))
        sizes = [count * size for count in (1, values) for size in (rows, self._most_rows)]
        if any(is_near_number(number, size) for number in others for size in sizes):
            yield (
                f"The function {self._name!r} divides a sum, or its gradients, by the examples of the global batch and by {self._replicas} "
                f"replicas too, and what replicas give is added up: it is divided twice. Divide by the examples alone."
            )

    def _judge_gradients(self, numbers: list[float]) -> Iterator[str]:
        """Yield the fault of gradients that are divided twice. They are those of a mean over the global batch."""
        twice = self._find_second_divisor(numbers, self._most_rows)
        if twice is not None and math.prod(numbers) > HALF:  # it is not multiplied by the same number
            yield (
                f"The function {self._name!r} divides by {twice:.0f} the gradients that un.value_and_grad returned, which are divided by the rows "
                f"of the global batch already, and are added up over replicas: they are divided twice. Apply them as they are. If a smaller "
                f"step is meant, set the learning rate."
            )

    def _judge_constants(self, part: LossPart, divisors: Sequence[float], numbers: Sequence[float], rows: int) -> Iterator[str]:
        """Yield the fault of a sum divided by an unrelated number.

        It is neither the values in the global batch, nor its rows, nor the replicas.
        """
        sizes = part.values_per_row * rows, rows, self._replicas
        if any(is_near_number(number, size) for number in numbers for size in sizes):
            return
        origins = zip(divisors, part.path.divisors, strict=True)
        named = [divisor for divisor, origin in origins if divisor > HALF and not isinstance(origin, NumberArgument)]
        of_other_batch = [divisor for divisor in (*divisors, *part.path.factors) if is_near_number(divisor, self._most_rows)]
        if named or of_other_batch:
            yield self._describe_constant(max(named + of_other_batch), rows)

    def _describe_constant(self, divisor: float, rows: int) -> str:
        return (
            f"The function {self._name!r} divides a sum by {divisor:.6g}, and this global batch has {rows} rows: its examples weigh "
            f"{rows}/{divisor:.6g} of what they do in the mean. {ADVICE}"
        )

    def _judge_vector(self, shape: Shape, divisors: list[float], rows: int) -> Iterator[str]:
        twice = self._find_second_divisor(divisors, rows)
        if twice is not None and not is_near_number(twice, math.prod(shape[1:])):
            yield (
                f"The function {self._name!r} divides the loss of each example by {twice:.0f}, and the engine divides their sum by the "
                f"{rows} rows of this global batch: it is divided twice. Give the losses as they are."
            )

    def _judge_mean(self, divisors: list[float]) -> Iterator[str]:
        twice = self._find_second_divisor(divisors, self._most_rows)
        if twice is not None:
            yield (
                f"The function {self._name!r} divides by {twice:.0f} what un.compute_average_loss returned, which is divided by the rows of the "
                f"global batch already: it is divided twice. Return it as it is. If a weight is meant, write {1 / twice:.3g} * loss."
            )

    def _find_second_divisor(self, divisors: list[float], rows: int) -> float | None:
        """Find a divisor that is the batch's rows or the replicas. It may be a product of divisors."""
        sizes = rows, self._most_rows, self._replicas
        products = [number for number in list_products(divisors) if number > HALF]
        return next((number for number in products if any(is_near_number(number, size) for size in sizes)), None)


def is_additive(part: LossPart, replicas: int) -> bool:
    """Whether a part of a loss adds up over replicas.

    As far as its growth tells, it is a sum, or a mean divided by their number.
    """
    by_replicas = any(is_near_number(number, replicas) for number in list_products(part.path.known_numbers))
    return part.growth == SUM or (part.growth == MEAN and by_replicas)


def resolve_divisors(divisors: Iterable[float | NumberArgument], arguments: Sequence[float | None]) -> list[float]:
    """Put arguments in the places of divisors. 1 stands for a number that only a device knows."""
    numbers = [arguments[divisor.position] if isinstance(divisor, NumberArgument) else divisor for divisor in divisors]
    return [1.0 if divisor is None else divisor for divisor in numbers]


def list_products(numbers: Sequence[float]) -> Iterable[float]:
    """List the products of some of the numbers. A mean may be halved, or weighted, beside being divided."""
    first = numbers[:6]
    return (math.prod(chosen) for count in range(1, len(first) + 1) for chosen in itertools.combinations(first, count))


def is_near_number(number: float, other: float) -> bool:
    return math.isclose(number, other, rel_tol=CLOSE)
