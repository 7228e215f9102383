"""Growth of the parts of a loss with the rows.

Replica code makes such losses itself. They are traced on a replica's rows, and on twice the rows. A sum doubles, and the sums of
replicas add up to the sum of the batch. A mean stays the same; so does its gradient, which the engine adds up over R replicas. A
divisor that is the same in both traces is no number of rows: this tells the divisor R from the divisor of a mean over R rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import keras

from unisono._src.engine.phases.kinds import Layout
from unisono._src.engine.phases.twins import ProgramsDifferError, pair
from unisono._src.keras.checks.user_code.provenance import CLOSE, LossTerm, NumberArgument, Provenance, Scaling
from unisono._src.keras.checks.user_code.row_growth import Growth, RowGrowth
from unisono._src.keras.private.compiled_losses import is_loss_of_keras
from unisono._src.programs.operands import get_shape

Divisor = float | NumberArgument

MEAN = 1.0
SUM = 2.0
"""The factors of a mean and of a sum when the rows are doubled."""


class LossPart(NamedTuple):
    """A part of a loss."""

    growth: float | None
    """1 for a mean over the rows, 2 for a sum; None where the code does not tell."""
    path: Scaling
    """The constants that it is divided by for any number of rows."""
    of_rows: bool
    values_per_row: float = 0
    """The number of elements of each row in the sum, where the jaxpr shows it."""
    adds_up: bool = True
    """Whether it is a sum of values of single rows, times what is the same for all."""


class TwoTraces(NamedTuple):
    """A function traced on a replica's rows, and on twice the rows."""

    on_rows: Provenance
    on_both: Provenance
    growth: RowGrowth
    """By the variables of `on_both`."""
    size: int
    """The rows of `on_rows`."""


def compare_traces(on_rows: Provenance, trace_of: Callable[[int], Provenance], size: int) -> TwoTraces | None:
    """Trace the function on twice the rows, and find each value's growth.

    None where it cannot be traced so, or the trace differs.
    """
    try:
        if size == 1:  # code broadcasts one row
            on_rows, size = trace_of(2), 2
        on_both = trace_of(2 * size)
        twins = pair(on_both.program, on_rows.program, 2 * size, size)
    except ProgramsDifferError:
        return None
    except Exception:  # of the user's code, on a number of rows that it was not written for; on the replica's rows it was traced
        return None
    arrays = on_both.trace.arrays
    inputs = on_both.program.jaxpr.invars
    known = dict.fromkeys(inputs[:arrays], Growth(layout=Layout(0))) | {inputs[-1]: Growth(power=1)}
    for variable in on_both.list_noted("gave"):  # the results of layers and losses count as values of single rows
        growing = twins.find_growing(variable)
        layout = Layout(growing[0], 1, get_shape(variable)[growing[0]] // twins.rows) if growing else None
        known[variable] = Growth(layout=layout)
    known |= dict.fromkeys(on_both.list_noted("derivatives"), Growth(power=1, is_merged=True))
    return TwoTraces(on_rows, on_both, RowGrowth(twins, known), size)


def find_loss_parts(sources: Provenance, both: TwoTraces | None, size: int, replicas: int) -> list[LossPart]:
    """Find the parts of the losses that replica code differentiates. Shares of a mean over the global batch are left out.

    Args:
        sources: The code, traced on the replica's rows.
        both: The same, with the trace on twice the rows, if there is one.
        size: The number of the replica's rows.
        replicas: R. The losses of a single replica are those of the batch, whatever their growth.
    """
    if both is None or len(both.on_rows.loss_terms) != len(both.on_both.loss_terms):
        return [classify_by_divisors(term, size) for term in sources.loss_terms]
    pairs = zip(both.on_rows.loss_terms, both.on_both.loss_terms, strict=True)
    return [classify(*pair_of, both.growth, both.size, replicas) for pair_of in pairs]


def classify(term: LossTerm, twice: LossTerm, growths: RowGrowth, size: int, replicas: int) -> LossPart:
    """Classify a term of a loss by its growth.

    The constants on the way to it are the same for any number of rows, apart from sizes.
    """
    if not term.of_rows:
        return LossPart(MEAN, term.path, False)
    measured = growths.of(twice.variable)
    growth = None if measured.power is None or replicas == 1 else scale_growth(2.0**measured.power, term, twice)
    if growth is None:
        return classify_by_divisors(term, size)._replace(adds_up=measured.adds_up)
    return LossPart(growth, keep_common_constants(term, twice, growth), True, term.elements / size, measured.adds_up)


def scale_growth(growth: float, term: LossTerm, twice: LossTerm) -> float:
    """Scale the growth of a term to that in its loss. On the way there it may be divided by a number of rows."""
    pairs = zip(term.outer_scaling.divisors, twice.outer_scaling.divisors, strict=False)
    factors = zip(term.outer_scaling.factors, twice.outer_scaling.factors, strict=False)
    for one, other in [*pairs, *factors]:
        if not (isinstance(one, NumberArgument) or isinstance(other, NumberArgument)):
            growth *= one / other
    return next((kind for kind in (MEAN, SUM) if abs(growth - kind) <= CLOSE), growth)


def keep_common_constants(term: LossTerm, twice: LossTerm, growth: float | None) -> Scaling:
    """Keep the constants that divide a term in both traces. The numbers of rows in them are left out."""
    elements = term.elements if growth == MEAN else 0
    return Scaling(
        tuple(find_common_divisors(term.path.divisors, twice.path.divisors, elements)),
        cast(tuple[float, ...], tuple(find_common_divisors(term.path.factors, twice.path.factors, elements))),
    )


def find_common_divisors(numbers: Sequence[Divisor], others: Sequence[Divisor], elements: int) -> Iterator[Divisor]:
    """Yield the numbers that stand in both traces.

    `others` are those of twice the rows. `elements` are those of the sum that they make a mean.
    """
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
    """Classify a term by its divisors alone. A sum over rows that is divided by a replica's rows is a mean."""
    sizes = (term.elements, size) if term.elements else ()
    divisors = term.path.divisors
    position = next((index for index, divisor in enumerate(divisors) if any(is_alike(divisor, rows) for rows in sizes)), None)
    if not term.of_rows or position is None:
        return LossPart(None if term.of_rows else MEAN, term.path, term.of_rows, term.elements / size)
    return LossPart(MEAN, term.path._replace(divisors=divisors[:position] + divisors[position + 1 :]), True, term.elements / size)


def warn_of_coupled_rows(name: str, both: TwoTraces, parts: Sequence[LossPart]) -> None:
    """Warn of a function in which a replica's rows are coupled.

    This is so for values of rows that look at other rows, in losses, weights or what layers get, and for parts of losses that do
    not add up.
    """
    traced, growth = both.on_both, both.growth
    for called, variable in traced.trace.noted.get("gave", []):
        is_own_loss = isinstance(called, keras.losses.Loss) and not is_loss_of_keras(called)
        if is_own_loss and variable in growth.inside and growth.inside[variable].is_merged:
            warn_of_coupling(f"The loss {called.name!r}")
            return
    losses = [(origin == "weighted", loss) for origin, loss in traced.trace.noted.get("vector", [])]
    alone = [(True, variable) for kind in ("weights", "given") for variable in traced.list_noted(kind)]
    looks = any(
        made.is_merged if counts_alone else not (made.adds_up and made.power == 0)
        for counts_alone, variable in [*losses, *alone]
        if growth.twins.find_growing(variable)
        for made in [growth.of(variable)]
    )
    if looks or not all(part.adds_up for part in parts if part.of_rows):
        warn_of_coupling(f"The function {name!r}")


def warn_of_coupling(what: str) -> None:
    warnings.warn(
        f"{what} makes of all rows together what is not made of their parts. Each replica has its own rows alone, so that R replicas "
        f"have another loss than the whole batch, as with batch normalization. If it is to see the whole batch, train with fit, or write "
        f"replicas=1.",
        stacklevel=2,
    )
