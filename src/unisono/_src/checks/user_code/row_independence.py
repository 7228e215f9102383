"""Checks that each row's value, as replica code returns it, is made of this row alone, and a part of a loss of such values.

The results of layers and losses count as made of one row each, whatever layers do. Drawn values stand in their place, so that no net is run
and its random numbers do not count. The code that is left is tried on some rows, on other rows, and on both together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from unisono._src.checks.user_code.jaxpr import AtomValues, evaluate_variables, has_random_draws, slice_program
from unisono._src.checks.user_code.loss_growth import evaluate_terms
from unisono._src.checks.user_code.mixed_rows import mixes_rows
from unisono._src.checks.user_code.provenance import Provenance
from unisono._src.operands import Atom, get_shape, get_type
from unisono._src.replica.drawn_values import draw_rows_like
from unisono._src.replica.marks import find_compared_values, mark_rows
from unisono._src.replica.row_coupling import are_values_close, choose_tolerance, warn_of_coupling
from unisono._src.typing import AnyArray


def warn_of_coupled_rows(
    name: str,
    sources: Provenance,
    trace_of: Callable[[int], Provenance],
    size: int,
    constants: Sequence[AnyArray],
    with_losses: bool,
) -> None:
    """Warn of a function that returns values for each row that are made of other rows too, gives them to layers, or differentiates a number of
    this kind.

    Args:
        name: The name of the function.
        sources: The function, traced on a replica's rows.
        trace_of: Traces the function on another number of rows.
        size: The number of the replica's rows.
        constants: The other arrays that the function gets.
        with_losses: Whether the parts of its losses are checked too: not where another warning is about them.
    """
    made = {variable for _, variable in list_row_values(sources)} - set(sources.list_noted("gave"))
    if mixes_rows(sources, trace_of, size, constants):
        warn_of_coupling(f"The function {name!r}")
        return
    if not (with_losses or made):
        return
    try:
        on_both = trace_of(2 * size)
        inputs = draw_inputs(sources, on_both, size)
        coupled = any(has_coupled_rows(values, sources, on_both, size, constants, with_losses) for values in inputs)
    except Exception:
        # Of the user's code, on numbers of rows that it was not written for, of a callback in it on drawn values, or because it returns
        # something else then. On the replica's rows it was traced without an error, and the step runs it; only this warning is left out.
        return
    if coupled:
        warn_of_coupling(f"The function {name!r}")


def draw_inputs(sources: Provenance, on_both: Provenance, size: int) -> Iterator[dict[Atom, np.ndarray]]:
    """Yield drawn values for both halves, by the variables of `on_both`, and then values with marks for rows that do not count."""
    rng = np.random.default_rng(0)
    whole = {variable: draw_rows_like(rng, get_type(variable), rows=2 * size) for variable in find_inputs(on_both)}
    yield whole
    arrays = on_both.trace.arrays
    compared = find_compared_values(on_both.program, range(arrays))
    rows = on_both.program.jaxpr.invars[:arrays]
    for marked in mark_rows(rng, [whole[variable] for variable in rows], compared):
        yield whole | dict(zip(rows, marked, strict=True))


def has_coupled_rows(
    values: Mapping[Atom, np.ndarray],
    sources: Provenance,
    on_both: Provenance,
    size: int,
    constants: Sequence[AnyArray],
    with_losses: bool,
) -> bool:
    """Return whether, on these values of both halves, values of rows depend on other rows, or a part of a loss is neither the sum nor the mean of
    both halves.

    `sources` is the function on one half of the rows, `on_both` the function on both halves.
    """
    halves: list[dict[Atom, Any]] = [{}, {}]
    whole: dict[Atom, Any] = dict(values)
    for of_half, of_both in zip(find_inputs(sources), find_inputs(on_both), strict=True):
        is_of_rows = get_shape(of_half)[:1] == (size,) and get_shape(of_both)[:1] == (2 * size,)
        for half, rows in zip(halves, (slice(size), slice(size, None)), strict=True):
            half[of_half] = whole[of_both][rows] if is_of_rows else whole[of_both]
    close = choose_tolerance(get_type(variable) for variable in whole)
    runs = (sources, halves[0], 1), (sources, halves[1], 1), (on_both, whole, 2)
    for traced, known, times in runs:
        others = traced.program.jaxpr.invars[traced.trace.arrays :]
        known |= zip(others, [*constants, np.int32(0), np.float32(times)], strict=True)
    are_weighted = [is_weighted for is_weighted, _ in list_row_values(sources)]
    of_rows = zip(are_weighted, *(evaluate_row_values(traced, known) for traced, known, _ in runs), strict=False)
    of_losses = zip(*(evaluate_losses(traced, known) for traced, known, _ in runs if with_losses), strict=True)
    return any(are_values_apart(one, other, both, close, is_weighted) for is_weighted, one, other, both in of_rows) or any(
        is_apart([one + other, (one + other) / 2], both, close) for one, other, both in of_losses
    )


def are_values_apart(one: np.ndarray, other: np.ndarray, both: np.ndarray, close: float, is_weighted: bool) -> bool:
    """Return whether values for each row are others where there are more rows.

    Values that are only moved between rows, as when a mean over rows is added to each, do not change their sum. Weights may have no rows.
    """
    if one.shape == both.shape or not is_apart([np.concatenate([one, other])], both, close):
        return False
    size = float(np.sum(np.abs(both)))
    return is_weighted or not abs(float(np.sum(one) + np.sum(other) - np.sum(both))) <= close * size


def is_apart(expected: list[np.ndarray], value: np.ndarray, close: float) -> bool:
    return bool(np.all(np.isfinite(value))) and not any(are_values_close(one, value, close) for one in expected)


def find_inputs(sources: Provenance) -> list[Atom]:
    """Return the variables that values are drawn for: the rows, and the results of layers and losses."""
    return list(dict.fromkeys([*sources.program.jaxpr.invars[: sources.trace.arrays], *sources.list_noted("gave")]))


def list_row_values(sources: Provenance) -> list[tuple[bool, Atom]]:
    """Return the losses and weights of examples, each as (whether single values count, not their sum alone; the variable)."""
    losses = [(origin == "weighted", loss) for origin, loss in sources.trace.noted.get("vector", [])]
    weights = [(True, weights) for weights in sources.list_noted("weights") if get_shape(weights)]
    return [(is_weighted, value) for is_weighted, value in [*losses, *weights] if not isinstance(value, core.Literal)]


def evaluate_row_values(sources: Provenance, given: AtomValues) -> list[np.ndarray]:
    """Return the losses and weights of examples, from the given values; none where random numbers go into them."""
    targets = [value for _, value in list_row_values(sources)]
    if has_random_origin(sources, targets, given):
        return []
    return [np.asarray(value) for value in evaluate_variables(sources.program, targets, given)]


def evaluate_losses(sources: Provenance, given: AtomValues) -> list[np.ndarray]:
    """Return the values of the terms of losses; terms with random numbers are left out."""
    of_rows = [term for term in sources.loss_terms if term.of_rows]
    return evaluate_terms(sources, [term for term in of_rows if not has_random_origin(sources, [term.variable], given)], given)


def has_random_origin(sources: Provenance, targets: Sequence[Atom], given: AtomValues) -> bool:
    """Return whether random numbers go into these variables."""
    return has_random_draws(slice_program(sources.program.jaxpr, targets, given).equations)
