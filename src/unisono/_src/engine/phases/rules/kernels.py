"""Calls of our own kernels: attention, normalized rows, sums of columns.

They are in a jaxpr before its gradient is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from unisono._src.engine.phases.kinds import Layout, Merge, Outcomes
from unisono._src.engine.phases.rules.rule import Layouts, Rule
from unisono._src.engine.phases.twins import Equation
from unisono._src.programs.operands import get_shape

ITEMS, QUERIES, KEYS = 3, 4, 5
"""Dimensions of an attention: three of items, then groups, queries, keys."""


def call_kernel(equation: Equation, layouts: Layouts) -> Outcomes:
    rule = KERNELS.get(equation.whole.params["target_name"])
    return None if rule is None else rule(equation, layouts)


def flatten_axes(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of rows when all axes of a shape become one."""
    before, after = math.prod(shape[: layout.axis]), math.prod(shape[layout.axis + 1 :])
    return Layout(0, before * layout.outer, layout.inner * after)


def normalize(equation: Equation, layouts: Layouts) -> Outcomes:
    """Keep rows, with two numbers for each line. The last axis is that of features."""
    x, *vectors = layouts
    shape = equation.shape(0)[:-1]
    if x is None or x.axis == len(shape) or any(vectors):
        return None
    return [x, flatten_axes(x, shape)]


def normalize_gradient(equation: Equation, layouts: Layouts) -> Outcomes:
    x, scale, numbers, by_result = layouts
    shape = equation.shape(0)[:-1]
    if x is None or x.axis == len(shape) or by_result != x or numbers != flatten_axes(x, shape) or scale is not None:
        return None
    return [x, Merge(), Merge()]


def sum_columns(equation: Equation, layouts: Layouts) -> Outcomes:
    """Merge the sums over all axes but the last one."""
    first, second, *vectors = layouts
    is_last = first is None or first.axis == len(equation.shape(0)) - 1
    return [Merge()] if not is_last and first == second and not any(vectors) else None


def read_sizes(equation: Equation) -> tuple[list[int], list[int]]:
    """Read an attention's dimensions, for the whole batch and for a shard."""
    words = [dict(one.params["attributes"])["words"].val for one in (equation.whole, equation.shard)]
    whole, shard = (np.asarray(one)[:8].tolist() for one in words)
    return whole, shard


def find_rows(equation: Equation, layouts: Layouts) -> int | None:
    """Find the dimension of the rows in an attention. None where rows attend to rows, or some operands are shared by all rows."""
    whole, shard = read_sizes(equation)
    growing = [dimension for dimension, pair in enumerate(zip(whole, shard, strict=True)) if pair[0] != pair[1]]
    if len(growing) != 1 or growing[0] >= KEYS or layouts[0] is None:
        return None
    is_by_query = growing[0] >= ITEMS
    are_keys_shared = layouts[1] is None and layouts[2] is None
    are_keys_rows = layouts[1] is not None and layouts[2] is not None
    return growing[0] if (are_keys_shared if is_by_query else are_keys_rows) else None


def place_lines(equation: Equation, dimension: int, layout: Layout, count: int) -> Layout:
    """The layout of rows when the first `count` dimensions become one axis."""
    sizes = read_sizes(equation)[0][:count]
    return flatten_axes(layout.at(dimension), sizes)


def attend(equation: Equation, layouts: Layouts) -> Outcomes:
    dimension = find_rows(equation, layouts)
    queries = layouts[0]
    if dimension is None or queries is None:
        return None
    return [queries, place_lines(equation, dimension, queries, KEYS).at(1)]


def attend_gradient(equation: Equation, layouts: Layouts) -> Outcomes:
    dimension = find_rows(equation, layouts)
    queries, keys, values = layouts[:3]
    if dimension is None or queries is None:
        return None
    lines = place_lines(equation, dimension, queries, KEYS)
    if layouts[-1] != queries or layouts[-2] != lines.at(1):
        return None
    scores = None if get_shape(equation.whole.outvars[3]) == (0,) else place_lines(equation, dimension, queries, KEYS + 1)
    return [queries, keys or Merge(), values or Merge(), scores]


KERNELS: dict[str, Rule] = {
    "unisono_normalize_rows": normalize,
    "unisono_normalize_rows_gradient": normalize_gradient,
    "unisono_sum_columns": sum_columns,
    "unisono_sum_gated_columns": sum_columns,
    "unisono_attend": attend,
    "unisono_attend_gradient": attend_gradient,
}
"""Means and variances of columns have no rule: they are no sums. In layers with statistics of a replica they need none."""

RULES: dict[str, Rule] = {"ffi_call": call_kernel}
