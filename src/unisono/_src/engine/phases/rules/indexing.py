"""Gathers, scatters and dynamic slices.

Rows look up a table, or rows are added to a table.
"""

from __future__ import annotations

import functools

from jax import lax

from unisono._src.engine.phases.kinds import Layout, Merge, Outcomes
from unisono._src.engine.phases.rules.rule import Layouts, Rule, find_common
from unisono._src.engine.phases.twins import Equation
from unisono._src.programs.operands import get_shape

SCATTERED = {
    "scatter-add": "sum",
    "scatter_add": "sum",
    "scatter-sub": "sum",
    "scatter-max": "max",
    "scatter-min": "min",
    "scatter_max": "max",
    "scatter_min": "min",
}
STAYING = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
"""Modes in which a window over a whole axis is at 0, whatever its index says."""


def gather(equation: Equation, layouts: Layouts) -> Outcomes:
    operand, indices = layouts
    numbers = equation.whole.params["dimension_numbers"]
    of_batch = [axis for axis in range(len(get_shape(equation.whole.outvars[0]))) if axis not in numbers.offset_dims]
    if operand is None:
        assert indices is not None  # an operand has rows
        return [indices.at(of_batch[indices.axis])] if indices.axis < len(of_batch) else None
    if indices is None:
        return gather_from_rows(equation, operand)
    if operand.axis not in numbers.operand_batching_dims or not operand.matches(indices):
        return None
    place = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand.axis)]
    return [indices.at(of_batch[indices.axis])] if place == indices.axis else None


def gather_from_rows(equation: Equation, operand: Layout) -> Outcomes:
    """Gather the same indices of all rows. A window covers the whole axis of rows."""
    numbers = equation.whole.params["dimension_numbers"]
    is_whole = equation.whole.params["slice_sizes"][operand.axis] == equation.shape(0)[operand.axis]
    is_moved = operand.axis in numbers.start_index_map and equation.whole.params["mode"] not in STAYING
    if not is_whole or is_moved or operand.axis in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims):
        return None
    windows = [
        axis
        for axis in range(len(equation.shape(0)))
        if axis not in numbers.collapsed_slice_dims and axis not in numbers.operand_batching_dims
    ]
    return [operand.at(numbers.offset_dims[windows.index(operand.axis)])]


def scatter(equation: Equation, layouts: Layouts, operation: str | None) -> Outcomes:
    """Scatter rows into a shared table, as a merge, or into rows."""
    operand, indices, updates = layouts
    numbers = equation.whole.params["dimension_numbers"]
    if operand is None:
        return [Merge(operation, base=0)] if operation and indices and updates and indices.matches(updates) else None
    if updates is None or not operand.matches(updates):
        return None
    if indices is None:
        return scatter_into_rows(equation, operand, updates)
    is_own = operand.axis in numbers.operand_batching_dims and indices.matches(operand)
    return [operand] if is_own else None


def scatter_into_rows(equation: Equation, operand: Layout, updates: Layout) -> Outcomes:
    """Scatter to the same indices of all rows. A window covers the whole axis of rows."""
    numbers = equation.whole.params["dimension_numbers"]
    is_moved = operand.axis in numbers.scatter_dims_to_operand_dims and equation.whole.params["mode"] not in STAYING
    if is_moved or operand.axis in (*numbers.inserted_window_dims, *numbers.operand_batching_dims):
        return None
    windows = [
        axis
        for axis in range(len(equation.shape(0)))
        if axis not in numbers.inserted_window_dims and axis not in numbers.operand_batching_dims
    ]
    return [operand] if numbers.update_window_dims[windows.index(operand.axis)] == updates.axis else None


def slice_at(equation: Equation, layouts: Layouts) -> Outcomes:
    operand, *starts = layouts
    is_whole = operand is not None and get_shape(equation.whole.outvars[0])[operand.axis] == equation.shape(0)[operand.axis]
    return [operand] if is_whole and not any(starts) else None


def update_at(equation: Equation, layouts: Layouts) -> Outcomes:
    operand, update, *starts = layouts
    if operand is None or update is None or any(starts):
        return None
    return (
        [operand]
        if find_common([operand, update]) and equation.shape(1)[operand.axis] == equation.shape(0)[operand.axis]
        else None
    )


RULES: dict[str, Rule] = {
    "gather": gather,
    **{name: functools.partial(scatter, operation=operation) for name, operation in SCATTERED.items()},
    **dict.fromkeys(("scatter", "scatter-mul", "scatter_mul"), functools.partial(scatter, operation=None)),
    "dynamic_slice": slice_at,
    "dynamic_update_slice": update_at,
}
