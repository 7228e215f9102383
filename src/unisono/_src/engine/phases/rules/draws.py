"""Draws by keys of rows: each row draws by its own key."""

from __future__ import annotations

from unisono._src.engine.phases.kinds import Outcomes
from unisono._src.engine.phases.rules.rule import Layouts, Rule, find_common, keep
from unisono._src.engine.phases.twins import Equation


def keep_axis(equation: Equation, layouts: Layouts) -> Outcomes:
    return keep(equation, find_common(layouts))


def draw_gamma(equation: Equation, layouts: Layouts) -> Outcomes:
    """Refuse one key for all rows. It is split for all elements, and a shard would begin with the first."""
    return None if None in layouts else keep_axis(equation, layouts)


NAMES = ("random_bits", "random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap", "threefry2x32")

RULES: dict[str, Rule] = dict.fromkeys(NAMES, keep_axis) | {"random_gamma": draw_gamma}
