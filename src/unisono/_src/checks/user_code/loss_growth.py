"""Growth of the parts of a loss that replica code makes by itself: measured on a replica's rows, and on the same rows taken twice.

A sum doubles, and the sums of replicas add up to the sum of the batch. A mean stays the same; so does its gradient, which the engine adds up
over R replicas. A divisor that is the same in both programs is no number of rows: this tells the divisor R from the divisor of a mean over R rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np

from unisono._src.checks.user_code.jaxpr import AtomValues, evaluate_variables, has_random_draws, walk_equations
from unisono._src.checks.user_code.provenance import CLOSE, LossTerm, NumberArgument, Provenance, Scaling
from unisono._src.replica.drawn_values import draw_values_like
from unisono._src.replica.growth import ENOUGH_ROWS, ROUGH, compute_growth_ratio
from unisono._src.typing import AnyArray

Divisor = float | NumberArgument

MEAN = 1.0
SUM = 2.0
"""How many times as large a mean and a sum are for twice as many rows."""

EXACT = 0.02
"""The largest distance of a ratio from 1 or 2: half precision rounds long sums."""


class LossPart(NamedTuple):
    """A part of a loss."""

    growth: float | None
    """1 for a mean over the rows, 2 for a sum; None where it could not be measured."""
    path: Scaling
    """The constants that it is divided by, whatever the number of rows."""
    of_rows: bool
    values_per_row: float = 0
    """How many elements of each row it is the sum of, where the program shows that."""


class ReplicaInputs(NamedTuple):
    """Rows and constants that a replica's part of a loss is measured on."""

    arrays: Sequence[np.ndarray]
    """The rows of one replica."""
    constants: Sequence[AnyArray]
    """The other arrays that the code gets."""

    def give_to(self, sources: Provenance, times: int) -> AtomValues:
        """Return the inputs of a program that was traced on the rows taken this many times: on replica 0, whose row fraction grows with them."""
        repeated = [np.concatenate([array] * times) for array in self.arrays]
        inputs = sources.program.jaxpr.invars
        return dict(zip(inputs, [*repeated, *self.constants, np.int32(0), np.float32(times)], strict=True))


def find_loss_parts(
    sources: Provenance, trace_of: Callable[[int], Provenance], inputs: ReplicaInputs, replicas: int
) -> list[LossPart]:
    """Return the parts of the losses that replica code differentiates, without shares of a mean over the global batch.

    Args:
        sources: The code, traced on the replica's rows.
        trace_of: Traces the code on another number of rows.
        inputs: The rows of a replica.
        replicas: R. The growth of a single replica's losses is not measured: its loss is that of the batch.
    """
    size = len(inputs.arrays[0])
    terms = sources.loss_terms
    if not any(term.of_rows for term in terms):
        return [LossPart(MEAN, term.path, False) for term in terms]
    times = -(-ENOUGH_ROWS // size) if replicas > 1 and has_random_draws(walk_equations(sources.program)) else 1
    try:
        on_rows = sources if times == 1 else trace_of(size * times)
        on_both = trace_of(size * times * 2)
        growths = measure_growths(on_rows, on_both, inputs, times) if replicas > 1 else [None] * len(terms)
        return [
            classify_by_divisors(term, size * times)
            if growth is None and replicas > 1
            else LossPart(growth, keep_common_constants(term, twice, growth), term.of_rows, term.elements / (size * times))
            for term, twice, growth in zip(on_rows.loss_terms, on_both.loss_terms, growths, strict=True)
        ]
    except Exception:
        # Of the user's code, on numbers of rows that it was not written for, of a callback in it, or because it has other losses then.
        # On the replica's rows it was traced without an error; what its program shows there is used.
        return [classify_by_divisors(term, size) for term in terms]


def measure_growths(on_rows: Provenance, on_both: Provenance, inputs: ReplicaInputs, times: int) -> list[float | None]:
    """Return how many times as large each term is where the rows are taken twice; None where that cannot be said."""
    rough = ROUGH if has_random_draws(walk_equations(on_rows.program)) else EXACT
    made_up = inputs._replace(arrays=[draw_values_like(np.random.default_rng(0), array) for array in inputs.arrays])
    growths: list[float | None] = []
    for given in (inputs, made_up):  # zeros tell nothing, and a first batch may be of zeros
        once = evaluate_terms(on_rows, on_rows.loss_terms, given.give_to(on_rows, times))
        twice = evaluate_terms(on_both, on_both.loss_terms, given.give_to(on_both, 2 * times))
        growths = [
            compute_growth_ratio(*values) if term.of_rows else MEAN
            for term, *values in zip(on_rows.loss_terms, once, twice, strict=True)
        ]
        if None not in growths:
            break
    return [None if growth is None else round_growth(growth, rough) for growth in growths]


def evaluate_terms(sources: Provenance, terms: Sequence[LossTerm], given: AtomValues) -> list[np.ndarray]:
    """Return the values that terms have in the loss, from the given values and up to factors that are the same for all rows."""
    values = evaluate_variables(sources.program, [term.variable for term in terms], given)
    return [
        np.asarray(value / math.prod(term.outer_scaling.known_numbers), "float64")
        for value, term in zip(values, terms, strict=True)
    ]


def round_growth(growth: float, distance: float) -> float:
    """Return 1 or 2 where the growth is as near to it as could be measured, else the growth."""
    return next((kind for kind in (MEAN, SUM) if abs(growth - kind) <= distance), growth)


def keep_common_constants(term: LossTerm, twice: LossTerm, growth: float | None) -> Scaling:
    """Return the constants by which a term is divided on the rows and on the rows taken twice, without the numbers of rows in them."""
    elements = term.elements if growth == MEAN else 0
    return Scaling(
        tuple(find_common_divisors(term.path.divisors, twice.path.divisors, elements)),
        cast(tuple[float, ...], tuple(find_common_divisors(term.path.factors, twice.path.factors, elements))),
    )


def find_common_divisors(numbers: Sequence[Divisor], others: Sequence[Divisor], elements: int) -> Iterator[Divisor]:
    """Yield what numbers have in common with others, of twice as many rows. `elements` are those of the sum that they make a mean."""
    left = list(others)
    for number in numbers:
        for index, other in enumerate(left):
            has_size = elements > 0 and not isinstance(number, NumberArgument) and is_alike(2 * number, other)
            if has_size or is_alike(number, other):
                yield cast(float, number) / elements if has_size else number
                del left[index]
                break


def is_alike(one: Divisor, other: Divisor) -> bool:
    if isinstance(one, NumberArgument) or isinstance(other, NumberArgument):
        return isinstance(one, NumberArgument) and isinstance(other, NumberArgument) and one == other
    return abs(one - other) <= CLOSE * abs(one)


def classify_by_divisors(term: LossTerm, size: int) -> LossPart:
    """Return the part that a term is, as far as the program shows it: a sum over rows that is divided by a replica's rows is a mean."""
    sizes = (term.elements, size) if term.elements else ()
    divisors = term.path.divisors
    position = next((index for index, divisor in enumerate(divisors) if any(is_alike(divisor, rows) for rows in sizes)), None)
    if not term.of_rows or position is None:
        return LossPart(None if term.of_rows else MEAN, term.path, term.of_rows, term.elements / size)
    return LossPart(MEAN, term.path._replace(divisors=divisors[:position] + divisors[position + 1 :]), True, term.elements / size)
