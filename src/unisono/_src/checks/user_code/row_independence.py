"""Checks that each row's value, as replica code returns it, is made of this row alone, and a part of a loss of such values.

The results of layers and losses count as made of one row each, whatever layers do. Drawn values stand in their place, so that no net is run
and its random numbers do not count. The code that is left is tried on some rows, on other rows, and on both together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from unisono._src.checks.user_code.jaxpr import Atom, is_random_primitive
from unisono._src.checks.user_code.loss_growth import AtomValues, evaluate_variables, find_loss_terms, scale_term_value
from unisono._src.checks.user_code.provenance import Provenance
from unisono._src.replica.compared_values import find_compared_values
from unisono._src.replica.marks import mark_rows
from unisono._src.replica.row_coupling import are_values_close, choose_tolerance, draw_rows_like, warn_of_coupling
from unisono._src.replica.variable_discovery import Trace
from unisono._src.typing import AnyArray


def warn_of_coupled_rows(
    name: str, trace: Trace, trace_of: Callable[[int], Trace], size: int, constants: Sequence[AnyArray], with_losses: bool
) -> None:
    """Warn of a function that returns values for each row that are made of other rows too, or differentiates a number of this kind.

    Args:
        name: The name of the function.
        trace: The function, traced on a replica's rows.
        trace_of: Traces the function on another number of rows.
        size: The number of the replica's rows.
        constants: The other arrays that the function gets.
        with_losses: Whether the parts of its losses are checked too: not where another warning is about them.
    """
    given = {variable for _, variable in trace.noted.get("gave", [])}
    vectors = [variable for _, variable in trace.noted.get("vector", []) if not isinstance(variable, core.Literal)]
    if all(variable in given for variable in vectors) and not with_losses:
        return
    try:
        coupled = has_coupled_rows(trace, trace_of(2 * size), size, constants, with_losses)
    except Exception:  # as of code that runs on one number of rows alone: this check does not change what is trained
        return
    if coupled:
        warn_of_coupling(f"The function {name!r}")


def has_coupled_rows(trace: Trace, on_both: Trace, size: int, constants: Sequence[AnyArray], with_losses: bool) -> bool:
    """Return whether values of rows depend on other rows, or a part of a loss is neither the sum nor the mean of both halves.

    `trace` is the function on one half of some rows, `on_both` the function on both halves.
    """
    return any(
        has_coupled_rows_on(values, trace, on_both, size, constants, with_losses) for values in draw_inputs(trace, on_both, size)
    )


def draw_inputs(trace: Trace, on_both: Trace, size: int) -> Iterator[dict[Atom, np.ndarray]]:
    """Yield drawn values for both halves, by the variables of `on_both`, and then values with marks for rows that do not count."""
    rng = np.random.default_rng(0)
    whole = {variable: draw_rows_like(rng, variable.aval, rows=2 * size) for variable in find_inputs(on_both)}
    yield whole
    compared = find_compared_values(on_both.program, range(on_both.arrays))
    rows = on_both.program.jaxpr.invars[: on_both.arrays]
    for arrays in mark_rows(rng, [whole[variable] for variable in rows], compared):
        yield whole | dict(zip(rows, arrays, strict=True))


def has_coupled_rows_on(
    values: Mapping[Atom, np.ndarray], trace: Trace, on_both: Trace, size: int, constants: Sequence[AnyArray], with_losses: bool
) -> bool:
    """Return whether the function couples rows, tried on these values of both halves."""
    halves: list[dict[Atom, Any]] = [{}, {}]
    whole: dict[Atom, Any] = dict(values)
    for of_half, of_both in zip(find_inputs(trace), find_inputs(on_both), strict=True):
        is_of_rows = of_half.aval.shape[:1] == (size,) and of_both.aval.shape[:1] == (2 * size,)
        for half, rows in zip(halves, (slice(size), slice(size, None)), strict=True):
            half[of_half] = whole[of_both][rows] if is_of_rows else whole[of_both]
    close = choose_tolerance(variable.aval for variable in whole)
    for traced, known, times in ((trace, halves[0], 1), (trace, halves[1], 1), (on_both, whole, 2)):
        known |= zip(traced.program.jaxpr.invars[traced.arrays :], [*constants, np.int32(0), np.float32(times)], strict=True)
    runs = (trace, halves[0]), (trace, halves[1]), (on_both, whole)
    are_weighted = [
        kind == "weighted" for kind, variable in trace.noted.get("vector", []) if not isinstance(variable, core.Literal)
    ]
    of_rows = zip(are_weighted, *(evaluate_vectors(*run) for run in runs), strict=False)
    of_losses = zip(*(evaluate_loss_terms(*run) for run in runs if with_losses), strict=True)
    return any(are_values_apart(one, other, both, close, is_weighted) for is_weighted, one, other, both in of_rows) or any(
        is_apart([one + other, (one + other) / 2], both, close) for one, other, both in of_losses
    )


def are_values_apart(one: np.ndarray, other: np.ndarray, both: np.ndarray, close: float, is_weighted: bool) -> bool:
    """Return whether values for each row are others where there are more rows.

    Values that are only moved between rows, as when a mean over rows is added to each, do not change their sum.
    """
    if not is_apart([np.concatenate([one, other])], both, close):
        return False
    size = float(np.sum(np.abs(both)))
    return is_weighted or not abs(float(np.sum(one) + np.sum(other) - np.sum(both))) <= close * size


def is_apart(expected: list[np.ndarray], value: np.ndarray, close: float) -> bool:
    return bool(np.all(np.isfinite(value))) and not any(are_values_close(one, value, close) for one in expected)


def find_inputs(trace: Trace) -> list[Atom]:
    """Return the variables that values are drawn for: the rows, and the results of layers and losses."""
    given = [variable for _, variable in trace.noted.get("gave", []) if not isinstance(variable, core.Literal)]
    return list(dict.fromkeys([*trace.program.jaxpr.invars[: trace.arrays], *given]))


def evaluate_vectors(trace: Trace, given: AtomValues) -> list[np.ndarray]:
    """Return the values of each row, from the given values; none where random numbers go into them."""
    sources = Provenance(trace.program, trace.arrays)
    targets = [variable for _, variable in trace.noted.get("vector", []) if not isinstance(variable, core.Literal)]
    if has_random_origin(sources, targets, given):
        return []
    return [np.asarray(value) for value in evaluate_variables(sources, targets, given)]


def evaluate_loss_terms(trace: Trace, given: AtomValues) -> list[np.ndarray]:
    """Return the terms of losses, from the given values and up to factors that are the same for all rows; terms with random numbers are left out."""
    sources, terms = find_loss_terms(trace)
    terms = [term for term in terms if term.of_rows and not has_random_origin(sources, [term.variable], given)]
    values = evaluate_variables(sources, [term.variable for term in terms], given)
    return [np.asarray(scale_term_value(value, term), "float64") for value, term in zip(values, terms, strict=True)]


def has_random_origin(sources: Provenance, targets: Sequence[Atom], given: AtomValues) -> bool:
    """Return whether random numbers go into these variables."""
    return any(is_random_primitive(equation.name) for _, equation in sources.slice_program(targets, given)[0])
