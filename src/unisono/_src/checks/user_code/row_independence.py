"""Whether the values for each row that replica code returns are made of their own rows alone, and the parts of its losses of those of rows.

What layers and losses give is taken for rows apart, whatever they do: drawn values stand in its place, so that neither a net is run nor its
random numbers count. What the code makes of that by itself is tried on some rows, on others, and on both together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend import core

from unisono._src.checks.user_code.jaxpr import is_random_name
from unisono._src.checks.user_code.loss_growth import divided, evaluated, terms_of
from unisono._src.checks.user_code.provenance import Sources
from unisono._src.replica.compared_values import compared_values
from unisono._src.replica.marks import marked
from unisono._src.replica.row_coupling import close_of, drawn, is_close, warn_of_coupling
from unisono._src.replica.variable_discovery import Trace


def warn_if_coupled(
    name: str, trace: Trace, trace_of: Callable[[int], Trace], size: int, constants: list[Any], with_losses: bool
) -> None:
    """Say that a function of this name returns values for each row that are made of other rows too, or differentiates a number that is.

    Args:
        name: Of the function.
        trace: The function on a replica's rows.
        trace_of: Traces it on another number of rows.
        size: The rows of the replica.
        constants: What else it is given.
        with_losses: Whether the parts of its losses are looked at, too: not where something else is said about them.
    """
    given = {variable for _, variable in trace.noted.get("gave", [])}
    vectors = [variable for _, variable in trace.noted.get("vector", []) if not isinstance(variable, core.Literal)]
    if all(variable in given for variable in vectors) and not with_losses:
        return
    try:
        coupled = is_coupled(trace, trace_of(2 * size), size, constants, with_losses)
    except Exception:  # code that runs on its own number of rows alone, say: what it trains does not depend on this look at it
        return
    if coupled:
        warn_of_coupling(f"The function {name!r}")


def is_coupled(trace: Trace, on_both: Trace, size: int, constants: list[Any], with_losses: bool) -> bool:
    """Whether the vectors of both parts of some rows, one behind the other, are not those of all of them, or a part of a loss is neither the
    sum nor the mean of both."""
    return any(is_coupled_on(drawn, trace, on_both, size, constants, with_losses) for drawn in drawn_inputs(trace, on_both, size))


def drawn_inputs(trace: Trace, on_both: Trace, size: int) -> Iterator[dict[Any, np.ndarray]]:
    """Return values for all rows, by the variables of the program on all of them; and the same with what marks rows that do not count."""
    rng = np.random.default_rng(0)
    whole = {of_both: drawn(rng, of_both.aval, rows=2 * size) for of_both in inputs(on_both)}
    yield whole
    compared = compared_values(on_both.program, range(on_both.arrays))
    rows = on_both.program.jaxpr.invars[: on_both.arrays]
    for arrays in marked(rng, [whole[variable] for variable in rows], compared):
        yield whole | dict(zip(rows, arrays, strict=True))


def is_coupled_on(
    values: Mapping[Any, np.ndarray], trace: Trace, on_both: Trace, size: int, constants: list[Any], with_losses: bool
) -> bool:
    """Return whether it is so on these rows."""
    parts: list[dict[Any, Any]] = [{}, {}]
    whole: dict[Any, Any] = dict(values)
    for of_part, of_both in zip(inputs(trace), inputs(on_both), strict=True):
        is_of_rows = of_part.aval.shape[:1] == (size,) and of_both.aval.shape[:1] == (2 * size,)
        for part, rows in zip(parts, (slice(size), slice(size, None)), strict=True):
            part[of_part] = whole[of_both][rows] if is_of_rows else whole[of_both]
    close = close_of(variable.aval for variable in whole)
    for of, known, times in ((trace, parts[0], 1), (trace, parts[1], 1), (on_both, whole, 2)):
        known |= zip(of.program.jaxpr.invars[of.arrays :], [*constants, np.int32(0), np.float32(times)], strict=True)
    runs = (trace, parts[0]), (trace, parts[1]), (on_both, whole)
    are_weighted = [of == "weighted" for of, variable in trace.noted.get("vector", []) if not isinstance(variable, core.Literal)]
    of_rows = zip(are_weighted, *(vectors(*run) for run in runs), strict=False)
    of_losses = zip(*(numbers(*run) for run in runs if with_losses), strict=True)
    return any(are_values_apart(a, b, c, close, of_weights) for of_weights, a, b, c in of_rows) or any(
        is_apart([a + b, (a + b) / 2], c, close) for a, b, c in of_losses
    )


def are_values_apart(one: np.ndarray, other: np.ndarray, both: np.ndarray, close: float, are_weighted: bool) -> bool:
    """Return whether values for each row are others where there are more rows. What is moved between rows alone, as a mean over them that is added to
    each, does not change their sum."""
    if not is_apart([np.concatenate([one, other])], both, close):
        return False
    size = float(np.sum(np.abs(both)))
    return are_weighted or not abs(float(np.sum(one) + np.sum(other) - np.sum(both))) <= close * size


def is_apart(expected: list[np.ndarray], value: np.ndarray, close: float) -> bool:
    return bool(np.all(np.isfinite(value))) and not any(is_close(of, value, close) for of in expected)


def inputs(trace: Trace) -> list[Any]:
    """What values are drawn for: the rows, and what layers and losses give."""
    given = [variable for _, variable in trace.noted.get("gave", []) if not isinstance(variable, core.Literal)]
    return list(dict.fromkeys([*trace.program.jaxpr.invars[: trace.arrays], *given]))


def vectors(trace: Trace, given: dict[Any, Any]) -> list[np.ndarray]:
    """The values of each row, from what is given; none where random numbers go into them."""
    sources = Sources(trace.program, trace.arrays)
    targets = [variable for _, variable in trace.noted.get("vector", []) if not isinstance(variable, core.Literal)]
    if is_drawn(sources, targets, given):
        return []
    return [np.asarray(value) for value in evaluated(sources, targets, given)]


def numbers(trace: Trace, given: dict[Any, Any]) -> list[np.ndarray]:
    """The parts of losses, from what is given, up to what is the same for all rows; none that random numbers go into."""
    sources, terms = terms_of(trace)
    terms = [term for term in terms if term.of_rows and not is_drawn(sources, [term.variable], given)]
    values = evaluated(sources, [term.variable for term in terms], given)
    return [np.asarray(divided(value, term), "float64") for value, term in zip(values, terms, strict=True)]


def is_drawn(sources: Sources, targets: list[Any], given: dict[Any, Any]) -> bool:
    """Whether random numbers go into these variables."""
    return any(is_random_name(equation.name) for _, equation in sources.what_makes(targets, given)[0])
