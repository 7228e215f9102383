"""The type of a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from unisono._src.engine.phases.kinds import Layout, Outcomes
from unisono._src.engine.phases.twins import Equation

Layouts: TypeAlias = Sequence[Layout | None]
Rule: TypeAlias = Callable[[Equation, Layouts], Outcomes]


def list_rows(layouts: Layouts) -> list[Layout]:
    """List the layouts of the operands that have rows."""
    return [layout for layout in layouts if layout is not None]


def find_common(layouts: Layouts) -> Layout | None:
    """Find the layout that all operands with rows have in common."""
    first, *others = list_rows(layouts)
    return first if all(other == first for other in others) else None


def keep(equation: Equation, layout: Layout | None) -> Outcomes:
    """Give all outputs this layout. None for no layout."""
    return None if layout is None else [layout] * len(equation.whole.outvars)
