"""Operations that move elements: the rows move with them.

Each row must keep its own elements.
"""

from __future__ import annotations

import math

from unisono._src.engine.phases.kinds import Layout, Outcomes
from unisono._src.engine.phases.rules.rule import Layouts, Rule, find_common, keep, list_rows
from unisono._src.engine.phases.twins import Equation
from unisono._src.programs.operands import get_shape
from unisono._src.typing import Shape


def broadcast(equation: Equation, layouts: Layouts) -> Outcomes:
    (layout,) = list_rows(layouts)
    return [layout.at(equation.whole.params["broadcast_dimensions"][layout.axis])]


def transpose(equation: Equation, layouts: Layouts) -> Outcomes:
    (layout,) = list_rows(layouts)
    return [layout.at(equation.whole.params["permutation"].index(layout.axis))]


def squeeze(equation: Equation, layouts: Layouts) -> Outcomes:
    (layout,) = list_rows(layouts)
    removed = [axis % len(equation.shape(0)) for axis in equation.whole.params["dimensions"]]
    return None if layout.axis in removed else [layout.at(layout.axis - sum(axis < layout.axis for axis in removed))]


def expand(equation: Equation, layouts: Layouts) -> Outcomes:
    (layout,) = list_rows(layouts)
    free = [axis for axis in range(len(get_shape(equation.whole.outvars[0]))) if axis not in equation.whole.params["dimensions"]]
    return [layout.at(free[layout.axis])]


def reshape(equation: Equation, layouts: Layouts) -> Outcomes:
    """Keep rows with equal numbers of blocks before and elements behind."""
    (layout,) = list_rows(layouts)
    old, new = equation.shape(0), get_shape(equation.whole.outvars[0])
    if equation.whole.params.get("dimensions") is not None:
        return None
    before = math.prod(old[: layout.axis]) * layout.outer
    behind = math.prod(old[layout.axis + 1 :]) * layout.inner
    shard = get_shape(equation.shard.outvars[0])
    for axis in range(len(new)):
        found = find_split(new, axis, before, behind, equation.rows)
        if found is not None and shard[axis] != new[axis]:
            return [found]
    return None


def find_split(shape: Shape, axis: int, before: int, behind: int, rows: int) -> Layout | None:
    """Find the layout of rows on an axis, from their surroundings.

    `before` counts blocks, `behind` elements. None where an axis does not have all rows.
    """
    outer, left = divmod(before, math.prod(shape[:axis]) or 1)
    inner, right = divmod(behind, math.prod(shape[axis + 1 :]) or 1)
    fits = not left and not right and outer * rows * inner == shape[axis]
    return Layout(axis, outer, inner) if fits else None


def concatenate(equation: Equation, layouts: Layouts) -> Outcomes:
    """Concatenate along another axis, or put rows behind rows. Each operand then adds its blocks."""
    axis = equation.whole.params["dimension"]
    rows = list_rows(layouts)
    if len(rows) < len(layouts):
        return None
    if any(layout.axis != axis for layout in rows):
        return keep(equation, find_common(layouts))
    outer = sum(layout.outer for layout in rows)
    return [Layout(axis, outer, rows[0].inner)] if len({layout.inner for layout in rows}) == 1 else None


def stack(equation: Equation, layouts: Layouts) -> Outcomes:
    layout = find_common(layouts) if None not in layouts else None
    return None if layout is None else [layout.at(layout.axis + (equation.whole.params["axis"] <= layout.axis))]


def unstack(equation: Equation, layouts: Layouts) -> Outcomes:
    (layout,) = list_rows(layouts)
    axis = equation.whole.params["axis"]
    return None if axis == layout.axis else keep(equation, layout.at(layout.axis - (axis < layout.axis)))


def split(equation: Equation, layouts: Layouts) -> Outcomes:
    (layout,) = list_rows(layouts)
    if equation.whole.params["axis"] != layout.axis:
        return keep(equation, layout)
    block = equation.shape(0)[layout.axis] // layout.outer
    sizes = equation.whole.params["sizes"]
    if any(size % block for size in sizes):
        return None
    return [Layout(layout.axis, size // block, layout.inner) for size in sizes]


def slice_parts(equation: Equation, layouts: Layouts) -> Outcomes:
    """Slice another axis, or whole blocks of rows."""
    (layout,) = list_rows(layouts)
    params = equation.whole.params
    axis = layout.axis
    start, stop = params["start_indices"][axis], params["limit_indices"][axis]
    stride = 1 if params["strides"] is None else params["strides"][axis]
    block = equation.shape(0)[axis] // layout.outer
    if stride != 1 or start % block or stop % block or stop == start:
        return None
    own_block = get_shape(equation.shard.invars[0])[axis] // layout.outer
    if equation.shard.params["start_indices"][axis] * block != start * own_block:
        return None
    return [Layout(axis, (stop - start) // block, layout.inner)]


def pad(equation: Equation, layouts: Layouts) -> Outcomes:
    (layout,) = list_rows(layouts)
    is_free = layouts[0] is not None and tuple(equation.whole.params["padding_config"][layout.axis]) == (0, 0, 0)
    return [layout] if is_free else None


def tile(equation: Equation, layouts: Layouts) -> Outcomes:
    """Repeat rows: the repeats are further blocks."""
    (layout,) = list_rows(layouts)
    return [Layout(layout.axis, layout.outer * equation.whole.params["reps"][layout.axis], layout.inner)]


def reverse(equation: Equation, layouts: Layouts) -> Outcomes:
    (layout,) = list_rows(layouts)
    return None if layout.axis in equation.whole.params["dimensions"] else [layout]


RULES: dict[str, Rule] = {
    "broadcast_in_dim": broadcast,
    "transpose": transpose,
    "squeeze": squeeze,
    "expand_dims": expand,
    "reshape": reshape,
    "concatenate": concatenate,
    "stack": stack,
    "unstack": unstack,
    "split": split,
    "slice": slice_parts,
    "pad": pad,
    "tile": tile,
    "rev": reverse,
}
