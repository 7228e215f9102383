"""The rules: what each primitive does to rows.

A file holds a family; `RULES` has them all. A rule gets an equation and the layout of each operand's rows; None for an operand
that is the same everywhere. At least one has rows. It returns the outcome of each output, or None, so that the rows are gathered.
Shapes are checked afterwards, by the twins.
"""

from __future__ import annotations

from unisono._src.engine.phases.rules import draws, elementwise, indexing, kernels, layout, loops, products, reductions, windows
from unisono._src.engine.phases.rules.rule import Rule

FAMILIES: dict[str, dict[str, Rule]] = {
    "elementwise": elementwise.RULES,
    "layout": layout.RULES,
    "reductions": reductions.RULES,
    "products": products.RULES,
    "windows": windows.RULES,
    "indexing": indexing.RULES,
    "loops": loops.RULES,
    "draws": draws.RULES,
    "kernels": kernels.RULES,
}
RULES: dict[str, Rule] = {name: rule for family in FAMILIES.values() for name, rule in family.items()}
"""By the name of the primitive. One without a rule gathers."""
