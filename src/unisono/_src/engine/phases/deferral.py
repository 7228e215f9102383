"""Move merges behind linear operations.

Parts of a sum are moved, converted and added to other parts before the shards hand them on. A gradient is transposed where it is
computed, so that kernels bring it into this form, and two parts of one gradient are one contribution.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.extend import core

from unisono._src.engine.phases.kinds import Kind, Local, Merge
from unisono._src.engine.phases.twins import Equation, Planned, Twins
from unisono._src.programs.operands import get_dtype, get_shape, list_variables

MOVES = frozenset(["copy", "expand_dims", "name", "neg", "reshape", "squeeze", "transpose"])
"""Operations of one operand. None makes its result larger than the operand."""
SUMS = frozenset(["add", "add_any"])


def defer_merges(twins: Twins, plan: Sequence[Planned], kinds: dict[core.Var, Kind]) -> list[Planned]:
    """Move merges behind linear operations whose operands nothing else reads. The kinds are updated to this plan."""
    read = list_variables([*(atom for planned in plan for atom in planned.equation.whole.invars), *twins.outputs])
    times_read = collections.Counter(read)
    is_output = set(list_variables(twins.outputs))
    made_at: dict[core.Var, int] = {}
    """The position in the plan that merges a value, for each sum of parts that is read once."""
    deferred: list[Planned] = []
    for place, planned in enumerate(plan):
        operands = planned.equation.whole.invars
        variables = list_variables(operands)
        if (
            not planned.in_shards
            and is_linear(planned.equation)
            and len(variables) == len(operands)
            and all(v in made_at for v in variables)
        ):
            for variable in variables:
                made = made_at[variable]
                deferred[made] = keep_part(deferred[made], variable)
                kinds[variable] = Local(max(0, kinds[variable].level - 1))
            planned = Planned(planned.equation, True, [None] * len(operands), [Merge()], inside=True)
        deferred.append(planned)
        for variable, merge in zip(planned.equation.whole.outvars, planned.merges, strict=False):
            if merge == Merge() and times_read[variable] == 1 and variable not in is_output:
                made_at[variable] = place
    return deferred


def is_linear(equation: Equation) -> bool:
    """Whether parts may go through an equation before they are added up. A conversion must not round each of them."""
    operands, results = equation.whole.invars, equation.whole.outvars
    if equation.name == "convert_element_type":
        return np.can_cast(get_dtype(operands[0]), get_dtype(results[0]))
    if equation.name == "reduce_sum":  # of nothing but axes of one element, as in the gradient of a bias
        return all(get_shape(operands[0])[axis] == 1 for axis in equation.whole.params["axes"])
    return equation.name in SUMS or (equation.name in MOVES and len(operands) == 1)


def keep_part(planned: Planned, variable: core.Var) -> Planned:
    """Leave one of an equation's results in the shards."""
    pairs = zip(planned.equation.whole.outvars, planned.merges, strict=True)
    return dataclasses.replace(planned, merges=[None if made is variable else merge for made, merge in pairs])
