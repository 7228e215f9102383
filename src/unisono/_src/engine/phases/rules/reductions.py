"""Reductions, cumulations and sorts.

Over rows they are merges, or gather. Along other axes rows stay.
"""

from __future__ import annotations

import functools

from unisono._src.engine.phases.kinds import Merge, Outcomes
from unisono._src.engine.phases.rules.rule import Layouts, Rule, find_common, keep
from unisono._src.engine.phases.twins import Equation

MERGED = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "product",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}


def reduce(equation: Equation, layouts: Layouts, operation: str | None = None) -> Outcomes:
    layout = find_common(layouts)
    axes = equation.whole.params["axes"]
    if layout is None:
        return None
    if layout.axis in axes:
        return None if operation is None else [Merge(operation)]
    return keep(equation, layout.at(layout.axis - sum(axis < layout.axis for axis in axes)))


def cumulate(equation: Equation, layouts: Layouts) -> Outcomes:
    layout = find_common(layouts)
    return None if layout is None or layout.axis == equation.whole.params["axis"] else [layout]


def sort(equation: Equation, layouts: Layouts) -> Outcomes:
    layout = find_common(layouts)
    is_free = layout is not None and None not in layouts and layout.axis != equation.whole.params["dimension"]
    return keep(equation, layout) if is_free else None


def take_largest(equation: Equation, layouts: Layouts) -> Outcomes:
    layout = find_common(layouts)
    axis = equation.whole.params.get("axis", -1) % len(equation.shape(0))
    return None if layout is None or layout.axis == axis else keep(equation, layout)


def transform(equation: Equation, layouts: Layouts) -> Outcomes:
    """Apply a Fourier transform to the last axes."""
    layout = find_common(layouts)
    first = len(equation.shape(0)) - len(equation.whole.params["fft_lengths"])
    return [layout] if layout is not None and layout.axis < first else None


def solve(equation: Equation, layouts: Layouts) -> Outcomes:
    """Apply linear algebra to the last two axes. Outputs have the axes before them alike."""
    layout = find_common(layouts)
    is_free = layout is not None and None not in layouts and layout.axis < len(equation.shape(0)) - 2
    return keep(equation, layout) if layout is not None and is_free else None


RULES: dict[str, Rule] = {
    **{name: functools.partial(reduce, operation=operation) for name, operation in MERGED.items()},
    **dict.fromkeys(("argmax", "argmin"), reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), cumulate),
    "sort": sort,
    "top_k": take_largest,
    "approx_top_k": take_largest,
    "fft": transform,
    **dict.fromkeys(("cholesky", "triangular_solve", "qr", "householder_product", "eigh", "svd", "lu"), solve),
}
