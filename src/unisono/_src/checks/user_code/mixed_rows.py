"""A check that layers and losses get rows of which each is made of itself alone.

What code does between layers may look at other rows, as when the mean over the rows is subtracted. So the values of one row are changed: the
values of the others must stay as they are. The results of layers and losses count as made of one row each, and drawn values stand in their
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono._src.checks.user_code.jaxpr import compile_variables, has_random_draws, slice_program
from unisono._src.checks.user_code.provenance import Provenance
from unisono._src.operands import Atom, find_dependents, get_shape, get_type
from unisono._src.replica.drawn_values import draw_rows_like
from unisono._src.typing import AnyArray


def mixes_rows(sources: Provenance, trace_of: Callable[[int], Provenance], size: int, constants: Sequence[AnyArray]) -> bool:
    """Return whether a layer or a loss gets rows that are made of other rows too.

    Args:
        sources: The function, traced on a replica's rows.
        trace_of: Traces the function on another number of rows.
        size: The number of the replica's rows.
        constants: The other arrays that the function gets.
    """
    if not find_made_inputs(sources, size):
        return False
    try:
        on_rows = sources if size > 1 else trace_of(2)
        size = max(size, 2)
        mixed = find_mixed_inputs(on_rows, size, constants)
        given, given_more = (traced.list_noted("given") for traced in (on_rows, trace_of(2 * size))) if mixed else ((), ())
        pairs = zip(given, given_more, strict=False)
        return any(one in mixed and get_shape(more)[:1] == (2 * get_shape(one)[0],) for one, more in pairs)
    except Exception:
        # Of the user's code on numbers of rows that it was not written for, or of a callback in it on drawn values. The step runs it on the
        # replica's rows; only this warning is left out.
        return False


def find_made_inputs(sources: Provenance, size: int) -> list[Atom]:
    """Return the arrays with rows that layers and losses get, without rows of the batch and results of layers as they are."""
    program = sources.program.jaxpr
    known = {*program.invars, *program.constvars, *sources.list_noted("gave")}
    made = [array for array in dict.fromkeys(sources.list_noted("given")) if array not in known]
    return [array for array in made if get_shape(array) and get_shape(array)[0] and not get_shape(array)[0] % size]


def find_mixed_inputs(sources: Provenance, size: int, constants: Sequence[AnyArray]) -> set[Atom]:
    """Return the arrays that layers and losses get in which other rows change with the first row, or with the last.

    Arrays with random numbers are left out.
    """
    program = sources.program
    rows = program.jaxpr.invars[: sources.trace.arrays]
    others = program.jaxpr.invars[sources.trace.arrays :]
    drawn = dict.fromkeys([*rows, *sources.list_noted("gave")])
    made = find_made_inputs(sources, size)
    targets = [array for array in made if not has_random_draws(slice_program(program.jaxpr, [array], drawn).equations)]
    if not targets:
        return set()
    rng = np.random.default_rng(0)
    compute = compile_variables(program, targets, {*drawn, *others})
    values: dict[Atom, Any] = {variable: draw_variable(rng, variable) for variable in drawn}
    values |= zip(others, [*constants, np.int32(0), np.float32(1)], strict=True)
    before = list(map(np.asarray, compute(values)))
    of_rows = find_dependents(program.jaxpr, rows)  # results of a layer may have as many rows, and be of something else
    moved = [variable for variable in drawn if variable in of_rows and get_shape(variable)[:1] == (size,)]
    mixed = set()
    for row in (0, size - 1):
        changed = {variable: replace_row(rng, values[variable], row) for variable in moved}
        after = map(np.asarray, compute(values | changed))
        for target, *pair in zip(targets, before, after, strict=True):
            if not are_of_row(find_moved(*pair), row, size, get_shape(target)[0]):
                mixed.add(target)
    return mixed


def draw_variable(rng: np.random.Generator, variable: Atom) -> np.ndarray:
    """Return drawn values of the shape of a variable."""
    rows = next(iter(get_shape(variable)), 0)
    drawn = draw_rows_like(rng, get_type(variable), rows + rows % 2)
    return drawn[:rows] if drawn.shape else drawn


def replace_row(rng: np.random.Generator, values: np.ndarray, row: int) -> np.ndarray:
    """Return the values, with others in this row."""
    replaced = values.copy()
    is_whole = values.dtype.kind in "iub"  # zeros and ones
    replaced[row] = values[row] == 0 if is_whole else rng.random(values.shape[1:])
    return replaced


def find_moved(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the positions, along the first axis, whose values are others."""
    is_same = (before == after) | (np.isnan(before) & np.isnan(after))
    return np.flatnonzero(~is_same.reshape(len(before), -1).all(axis=1))


def are_of_row(moved: np.ndarray, row: int, size: int, length: int) -> bool:
    """Return whether positions are those of one row. It has several where rows are cut in parts, or batches are joined.

    >>> are_of_row(np.array([1, 5]), row=1, size=4, length=8), are_of_row(np.array([2, 3]), row=1, size=4, length=8)
    (True, True)
    >>> are_of_row(np.array([0, 1]), row=1, size=4, length=4)
    False
    """
    return bool(np.all(moved % size == row) or np.all(moved // (length // size) == row))
