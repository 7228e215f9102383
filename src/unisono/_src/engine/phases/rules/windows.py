"""Windows: where a window is one row high, rows stay."""

from __future__ import annotations

from unisono._src.engine.phases.kinds import Outcomes
from unisono._src.engine.phases.rules.rule import Layouts, Rule, find_common, keep
from unisono._src.engine.phases.twins import Equation


def slide(equation: Equation, layouts: Layouts) -> Outcomes:
    layout = find_common(layouts)
    params = equation.whole.params
    if layout is None or params["window_dimensions"][layout.axis] != 1:
        return None
    strides = params.get("window_strides")
    padding = params.get("padding")
    is_whole = (strides is None or strides[layout.axis] == 1) and (padding is None or tuple(padding[layout.axis]) == (0, 0))
    return keep(equation, layout) if is_whole else None


NAMES = [
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_scatter_add",
    "select_and_gather_add",
    "select_and_scatter",
]
RULES: dict[str, Rule] = dict.fromkeys(NAMES, slide)
