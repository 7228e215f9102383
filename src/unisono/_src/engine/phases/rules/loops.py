"""Loops and branches: rules are applied to their bodies.

This is repeated until the carries of a step have the layouts that the next step takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.extend import core

from unisono._src.engine.phases import rules
from unisono._src.engine.phases.kinds import Layout, Merge, Outcomes
from unisono._src.engine.phases.rules.rule import Layouts, Rule
from unisono._src.engine.phases.twins import Equation, ProgramsDifferError, Twins, has_same_literals, has_same_params, pair
from unisono._src.programs.inlining import inline_calls
from unisono._src.programs.operands import Atom
from unisono._src.programs.private.jaxprs import close_program, count_loop_inputs

MOVES = frozenset(
    [
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "expand_dims",
        "neg",
        "reduce_sum",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    ]
)
"""Linear operations of one operand: they may be applied to parts of a sum."""
JOINS = frozenset(["add", "add_any", "concatenate", "pad", "stack", "sub"])
"""Linear in all operands together: each must be a part, or zero."""
PRODUCTS = {"mul": (0, 1), "div": (0,), "dot_general": (0, 1)}
"""Linear in one of these operands, if the others are no parts."""


class Partial:
    """The kind of a part of a sum over rows, in bodies."""


PARTIAL = Partial()
Inner: TypeAlias = Layout | Partial | None


def follow(twins: Twins, kinds: Sequence[Inner], is_final: bool) -> list[Inner] | None:
    """Find the kinds of a body's outputs. None where a rule is missing, or where literals depend on the number of rows.

    Nothing but parts may be added to a part of a sum. This is checked only where the kinds are final: until then, a carry may yet
    become a part.
    """
    known: dict[core.Var, Inner] = dict(zip(twins.inputs, kinds, strict=True)) | dict.fromkeys(twins.constants)
    uniform: set[Atom] = set()

    def read(atom: Atom) -> Inner:
        return None if isinstance(atom, core.Literal) else known[atom]

    for equation in twins.equations:
        if not has_same_literals(equation):
            return None
        made = follow_equation(twins, equation, [read(atom) for atom in equation.whole.invars], uniform, is_final)
        if made is None:
            return None
        known |= zip(equation.whole.outvars, made, strict=True)
    return [read(atom) for atom in twins.outputs]


def follow_equation(
    twins: Twins, equation: Equation, kinds: list[Inner], uniform: set[Atom], is_final: bool
) -> Sequence[Inner] | None:
    """Find the kinds of an equation's outputs. None where it has no rule. `uniform` are values that grow, alike for all rows."""
    count = len(equation.whole.outvars)
    if PARTIAL in kinds:
        return [PARTIAL] * count if is_linear(equation, kinds, is_final) else None
    if not any(isinstance(kind, Layout) for kind in kinds):
        return [None] * count if note_uniform(twins, equation, uniform) else None
    operands = place_uniform(twins, equation, kinds, uniform)
    outcomes = None if operands is None else apply_rule(twins, equation, operands)
    if outcomes is None:
        return None
    if any(isinstance(outcome, Merge) and (outcome.operation != "sum" or outcome.base is not None) for outcome in outcomes):
        return None
    return [PARTIAL if isinstance(outcome, Merge) else outcome for outcome in outcomes]


def is_linear(equation: Equation, kinds: Sequence[Inner], is_final: bool) -> bool:
    """Whether an equation may be applied to parts of a sum."""
    parts = [place for place, kind in enumerate(kinds) if kind is PARTIAL]
    if any(isinstance(kind, Layout) for kind in kinds):
        return False
    if equation.name in JOINS:
        others = [atom for atom, kind in zip(equation.whole.invars, kinds, strict=True) if kind is not PARTIAL]
        return not is_final or all(isinstance(atom, core.Literal) and not np.any(atom.val) for atom in others)
    return equation.name in MOVES or (len(parts) == 1 and parts[0] in PRODUCTS.get(equation.name, ()))


def note_uniform(twins: Twins, equation: Equation, uniform: set[Atom]) -> bool:
    """Note that an equation's result grows with the rows, alike for all.

    It reads no rows itself. False where the result is not alike.
    """
    grown = [atom for atom in equation.whole.invars if twins.find_growing(atom)]
    if not any(twins.find_growing(variable) for variable in equation.whole.outvars):
        return not grown
    if not uniform.issuperset(grown) or (not grown and equation.name != "broadcast_in_dim"):
        return False
    uniform.update(equation.whole.outvars)
    return True


def place_uniform(twins: Twins, equation: Equation, kinds: list[Inner], uniform: set[Atom]) -> list[Layout | None] | None:
    """Find the layouts of the operands. Values alike for all rows take that of the rows. None where something else grows."""
    layouts = [kind for kind in kinds if isinstance(kind, Layout)]
    operands: list[Layout | None] = []
    for atom, kind in zip(equation.whole.invars, kinds, strict=True):
        axes = twins.find_growing(atom)
        if isinstance(kind, Layout) or not axes:
            operands.append(kind if isinstance(kind, Layout) else None)
        elif atom in uniform and len(axes) == 1:
            operands.append(layouts[0].at(axes[0]))
        else:
            return None
    return operands


def apply_rule(twins: Twins, equation: Equation, layouts: Layouts) -> Outcomes:
    """Apply the rule of an equation, and check shapes against its outcomes."""
    rule = rules.RULES.get(equation.name)
    pairs = zip(equation.whole.invars, layouts, strict=True)
    if (
        rule is None
        or equation.whole is equation.shard  # a shard has no equation of its own
        or not has_same_params(equation)
        or not all(layout is None or twins.fits(atom, layout) for atom, layout in pairs)
    ):
        return None
    outcomes = rule(equation, layouts)
    if outcomes is None:
        return None
    for variable, outcome in zip(equation.whole.outvars, outcomes, strict=True):
        is_right = twins.fits(variable, outcome) if isinstance(outcome, Layout) else not twins.find_growing(variable)
        if not is_right:
            return None
    return outcomes


def pair_bodies(equation: Equation, name: str) -> list[Twins] | None:
    """Pair the nested jaxprs of an equation. None where they differ."""
    whole, shard = equation.whole.params[name], equation.shard.params[name]
    programs = zip(whole, shard, strict=True) if isinstance(whole, tuple | list) else [(whole, shard)]
    pairs = [[inline_calls(close_program(program)) for program in both] for both in programs]
    try:
        return [pair(of_whole, of_shard, equation.rows, equation.shard_rows) for of_whole, of_shard in pairs]
    except ProgramsDifferError:
        return None


def settle(body: Twins, fixed: Sequence[Inner], carried: Sequence[Inner], steps: Sequence[Inner]) -> list[Inner] | None:
    """Iterate a body's carries until their kinds no longer change.

    The result is what the body makes then; None where a rule is missing.
    """
    carried = list(carried)
    for _ in range(2 * len(carried) + 1):
        made = follow(body, [*fixed, *carried, *steps], is_final=False)
        if made is None:
            return None
        become = [new if new is not None else old for new, old in zip(made, carried, strict=False)]
        if become == carried:
            return follow(body, [*fixed, *carried, *steps], is_final=True)
        carried = become
    return None


def finish_carries(made: Sequence[Inner], layouts: Layouts, first: int) -> list[Layout | Merge | None] | None:
    """Find the outcomes of carries. They begin as the operands from `first` on. None where one would lose its rows."""
    outcomes: list[Layout | Merge | None] = []
    for place, kind in enumerate(made, first):
        if kind is None and layouts[place] is not None:
            return None
        outcomes.append(Merge(base=place) if isinstance(kind, Partial) else kind)
    return outcomes


def scan(equation: Equation, layouts: Layouts) -> Outcomes:
    """Scan along another axis than the rows. A carry to which each step adds a sum over rows is a merge."""
    params: dict[str, Any] = equation.whole.params
    bodies = pair_bodies(equation, "jaxpr")
    consts, carries = count_loop_inputs(params)
    steps = [layout and layout.at(layout.axis - 1) for layout in layouts[consts + carries :]]
    if bodies is None:
        return None
    if any(layout is not None and layout.axis < 0 for layout in steps):
        return map_rows(equation, layouts, bodies[0]) if not carries else None
    made = settle(bodies[0], layouts[:consts], layouts[consts : consts + carries], steps)
    outcomes = None if made is None else finish_carries(made[:carries], layouts, consts)
    if made is None or outcomes is None:
        return None
    of_steps = [
        kind.at(kind.axis + 1) if isinstance(kind, Layout) else Merge() if kind is PARTIAL else None for kind in made[carries:]
    ]
    return [*outcomes, *of_steps]


def map_rows(equation: Equation, layouts: Layouts, body: Twins) -> Outcomes:
    """Scan the rows one after another, without carries. Each result belongs to its row."""
    rows = [layout for layout in layouts if layout is not None]
    is_apart = all(layout.axis == 0 and layout.matches(rows[0]) for layout in rows)
    grows = any(body.find_growing(variable) for variable in body.shapes)
    is_of_rows = equation.whole.params["length"] == rows[0].per_row * equation.rows
    return [rows[0]] * len(equation.whole.outvars) if is_apart and is_of_rows and not grows else None


def repeat(equation: Equation, layouts: Layouts) -> Outcomes:
    """Run a `while` whose condition is the same for all rows."""
    params: dict[str, Any] = equation.whole.params
    conditions, bodies = pair_bodies(equation, "cond_jaxpr"), pair_bodies(equation, "body_jaxpr")
    if conditions is None or bodies is None:
        return None
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    first = of_condition + of_body
    made = settle(bodies[0], layouts[of_condition:first], layouts[first:], [])
    if made is None:
        return None
    becomes = [new if new is not None else old for new, old in zip(made, layouts[first:], strict=True)]
    if PARTIAL in becomes or follow(conditions[0], [*layouts[:of_condition], *becomes], is_final=True) != [None]:
        return None
    return finish_carries(made, layouts, first)


def branch(equation: Equation, layouts: Layouts) -> Outcomes:
    """Take a branch that is the same for all rows."""
    bodies = pair_bodies(equation, "branches")
    if bodies is None or layouts[0] is not None:
        return None
    made = [follow(body, layouts[1:], is_final=True) for body in bodies]
    known = [kinds for kinds in made if kinds is not None]
    if len(known) < len(made):
        return None
    outcomes: list[Layout | Merge | None] = []
    for kinds in zip(*known, strict=True):
        different = set(kinds)
        if len(different) > 1:
            return None
        (kind,) = different
        outcomes.append(Merge() if isinstance(kind, Partial) else kind)
    return outcomes


RULES: dict[str, Rule] = {"scan": scan, "while": repeat, "cond": branch}
