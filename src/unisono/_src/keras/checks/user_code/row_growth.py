"""Find how each number of a function grows with the rows.

A sum over rows doubles with them, a mean stays the same. The function is traced for some rows and for twice the rows, and its
equations are followed. A number has a power: twice the rows make it 2**power times as large. And it adds up, or not: what
replicas make of their rows is a part of what all rows make where it is a sum of values of single rows, times what is the same for
all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend import core

from unisono._src.engine.phases.kinds import Layout, Merge
from unisono._src.engine.phases.rules.loops import apply_rule
from unisono._src.engine.phases.twins import Equation, Twins
from unisono._src.programs.operands import Atom, get_shape


class Growth(NamedTuple):
    """The growth of a value."""

    power: float | None = 0
    """Twice the rows make it 2**power times as large; None where its equations do not tell."""
    layout: Layout | None = None
    """Where it has rows."""
    is_spread: bool = False
    """Whether it has the values of all rows in unknown places."""
    is_merged: bool = False
    """Whether an element may depend on several rows."""
    adds_up: bool = True
    """Whether an element that depends on several rows is a sum of values of single rows, times what is the same for all."""
    has_constant: bool = False
    """Whether a term that does not depend on the rows is added to one of several rows."""

    @property
    def has_rows(self) -> bool:
        return self.layout is not None or self.is_spread


SAME = Growth()
"""The growth of what is the same for any number of rows."""
UNKNOWN = Growth(None, is_merged=True, adds_up=False)

SUMS = frozenset(["add", "add_any", "sub", "concatenate", "stack", "select_n", "pad"])
"""Additions, joins and choices: the result grows as its parts do."""
MOVES = frozenset(
    [
        "broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "expand_dims", "gather", "name", "neg", "optimization_barrier",
        "reduce_precision", "reduce_sum", "reshape", "rev", "scatter-add", "slice", "split", "squeeze", "stop_gradient", "transpose",
    ]
)  # fmt: skip
"""Linear in the first operand."""
SPREADING = frozenset(["reshape", "rev", "sort", "transpose"])
"""Primitives that only move values to other places."""
PRODUCTS = frozenset(["mul", "dot_general", "conv_general_dilated"])
POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2}


class RowGrowth:
    """The growth of each value of a function with the rows. The function is traced for some rows, and for twice the rows."""

    def __init__(self, twins: Twins, known: Mapping[core.Var, Growth]) -> None:
        """Follow the equations. `known` are the growths of inputs, and of values whose equations are not looked at."""
        self.twins = twins
        self._known = dict(known)
        self.inside: dict[core.Var, Growth] = {}
        """The growths of known values, by the equations that make them."""
        self._growths: dict[core.Var, Growth] = (
            dict.fromkeys(twins.constants, SAME) | dict.fromkeys(twins.inputs, SAME) | self._known
        )
        for equation in twins.equations:
            made = self._follow(equation)
            for variable, growth in zip(equation.whole.outvars, made, strict=True):
                if variable in self._known:
                    self.inside[variable] = growth
                self._growths[variable] = self._known.get(variable, growth)

    def of(self, atom: Atom) -> Growth:
        return SAME if isinstance(atom, core.Literal) else self._growths[atom]

    def _follow(self, equation: Equation) -> Sequence[Growth]:
        """Find the growths of an equation's results."""
        operands = [self._read(*pair) for pair in zip(equation.whole.invars, equation.shard.invars, strict=True)]
        count = len(equation.whole.outvars)
        if not any(growth.has_rows for growth in operands):
            made = combine(equation, operands)
            return [self._place(variable, made) for variable in equation.whole.outvars]
        if any(growth.is_spread for growth in operands):
            return self._follow_spread(equation, operands)
        layouts = [growth.layout for growth in operands]
        outcomes = apply_rule(self.twins, equation, layouts)
        made = combine(equation, operands)
        if outcomes is None:
            moved = made._replace(layout=None, is_spread=True) if equation.name in SPREADING else UNKNOWN
            return [moved] * count
        return [self._finish(made, outcome) for outcome in outcomes]

    def _finish(self, made: Growth, outcome: Layout | Merge | None) -> Growth:
        if isinstance(outcome, Layout):
            return made._replace(layout=outcome)
        if isinstance(outcome, Merge) and outcome.operation == "sum":
            power = None if made.power is None else made.power + 1
            return made._replace(power=power, layout=None, is_merged=True)
        return made._replace(layout=None, is_merged=True, adds_up=False)

    def _follow_spread(self, equation: Equation, operands: Sequence[Growth]) -> Sequence[Growth]:
        """Find the growths of what depends on values in unknown places. It is their sum, or one value of each."""
        made = combine(equation, operands)
        (variable, *others) = equation.whole.outvars
        if others or sum(growth.has_rows for growth in operands) > 1:
            return [UNKNOWN] * (1 + len(others))
        if self.twins.find_growing(variable):
            return [made._replace(layout=None, is_spread=True)]
        power = None if made.power is None else made.power + 1
        is_sum = equation.name == "reduce_sum"
        return [made._replace(power=power, layout=None, is_spread=False, is_merged=True) if is_sum else UNKNOWN]

    def _read(self, atom: Atom, of_shard: Atom) -> Growth:
        """The growth of an operand. A literal's follows from its values in both traces."""
        if isinstance(atom, core.Literal):
            return Growth(measure_power(atom, of_shard))
        return self._growths[atom]

    def _place(self, variable: core.Var, made: Growth) -> Growth:
        """Place what depends on no rows. Where its shape grows, it has a part for each row."""
        growing = self.twins.find_growing(variable)
        if not growing:
            return made
        layout = Layout(growing[0], 1, max(1, get_shape(variable)[growing[0]] // self.twins.rows))
        return made._replace(layout=layout) if self.twins.fits(variable, layout) else made._replace(is_spread=True)


def combine(equation: Equation, operands: Sequence[Growth]) -> Growth:
    """Find the growth of an equation's result, element by element."""
    name = equation.name
    is_merged = any(growth.is_merged for growth in operands)
    adds_up = all(growth.adds_up for growth in operands)
    before = any(growth.has_constant for growth in operands)
    merged = [growth.is_merged for growth in operands]
    powers = [growth.power for growth in operands]
    if name in PRODUCTS:
        return Growth(add_powers(powers), None, False, is_merged, adds_up and sum(merged) <= 1, before)
    if name == "div":
        inverse = None if powers[1] is None else -powers[1]
        return Growth(add_powers([powers[0], inverse]), None, False, is_merged, adds_up and not merged[1], before)
    if name in MOVES:
        return Growth(powers[0] if powers else 0, None, False, is_merged, adds_up and not any(merged[1:]), before)
    if name in SUMS:
        of_values = operands[1:] if name == "select_n" else operands
        counted = [
            growth.power
            for growth, atom in zip(of_values, equation.whole.invars[-len(of_values) :], strict=True)
            if not is_zero(atom)
        ]
        has_constant = is_merged and len(counted) > sum(growth.is_merged or growth.has_rows for growth in of_values)
        is_chosen = of_values is not operands and merged[0]
        return Growth(find_common(counted), None, False, is_merged, adds_up and not is_chosen, has_constant or before)
    exponent = equation.whole.params.get("y") if name == "integer_pow" else POWERS.get(name)
    power = None if None in powers else 0.0 if not any(powers) else None
    if exponent is not None and powers[0] is not None:
        power = powers[0] * exponent
    return Growth(power, is_merged=is_merged, adds_up=adds_up and not is_merged)


def measure_power(of_both: Atom, of_rows: Atom) -> float | None:
    """Measure the power of a literal from its values in both traces. None where they are neither equal nor scaled as the rows."""
    assert isinstance(of_both, core.Literal)
    assert isinstance(of_rows, core.Literal)
    both, rows = np.asarray(of_both.val, "float64"), np.asarray(of_rows.val, "float64")
    if np.array_equal(both, rows, equal_nan=True):
        return 0
    ratio = float(both / rows) if rows.shape == () and rows else 0.0
    return next((power for power in (1, -1, 0.5, -0.5, 2, -2) if math.isclose(ratio, 2**power, rel_tol=1e-3)), None)


def add_powers(powers: Sequence[float | None]) -> float | None:
    return None if None in powers else sum(power for power in powers if power is not None)


def find_common(powers: Sequence[float | None]) -> float | None:
    """The power of a sum: the one that all its terms have."""
    return next(iter(set(powers)), 0) if len(set(powers)) <= 1 else None


def is_zero(atom: Atom) -> bool:
    return isinstance(atom, core.Literal) and not np.any(atom.val)
