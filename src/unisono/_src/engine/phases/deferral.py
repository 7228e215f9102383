"""Move merges behind linear operations.

Parts of a sum are moved, converted and added to other parts before the shards hand them on. A gradient is transposed where it is
computed, so that kernels bring it into this form, and two parts of one gradient are one contribution. And a sum is merged where it is
smallest: the gradient of a product of two narrow matrices, as in adapters of low rank, is multiplied on by each shard.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.extend import core

from unisono._src.engine.phases.kinds import Everywhere, Kind, Local, Merge
from unisono._src.engine.phases.twins import Equation, Planned, Twins
from unisono._src.programs.operands import count_bytes, get_dtype, get_shape, get_type, list_variables

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


def merge_smallest(twins: Twins, plan: Sequence[Planned], kinds: dict[core.Var, Kind]) -> list[Planned]:
    """Move merges behind products with what is the same everywhere, where the results are smaller. The kinds are updated."""
    readers: dict[core.Var, list[int]] = collections.defaultdict(list)
    for place, planned in enumerate(plan):
        for variable in dict.fromkeys(list_variables(planned.equation.whole.invars)):
            readers[variable].append(place)
    is_output = set(list_variables(twins.outputs))
    moved = list(plan)

    def find_smallest(variable: core.Var, level: int) -> tuple[int, list[core.Var]]:
        """Find what is merged in place of a sum: (bytes, values). `level` is that of the sum's parts."""
        own = count_bytes(variable), [variable]
        reading = [moved[place] for place in readers[variable]]
        are_multiples = (not each.in_shards and is_multiple(each.equation, variable, kinds, level) for each in reading)
        if not reading or variable in is_output or not all(are_multiples):
            return own
        smallest = [find_smallest(each.equation.whole.outvars[0], level) for each in reading]
        products = sum(size for size, _ in smallest), [value for _, values in smallest for value in values]
        return min(own, products, key=lambda merged: merged[0])

    def compute_in_shards(variable: core.Var, level: int, merged: Sequence[core.Var]) -> None:
        """Let shards compute what is made of their parts of a sum, up to what is merged."""
        kinds[variable] = Local(level)
        for place in readers[variable]:
            equation = moved[place].equation
            (product,) = equation.whole.outvars
            merge = Merge() if product in merged else None
            moved[place] = Planned(equation, True, [None] * len(equation.whole.invars), [merge], inside=True)
            if merge is None:
                compute_in_shards(product, level, merged)

    for place, planned in enumerate(plan):
        for variable, merge in zip(planned.equation.whole.outvars, planned.merges, strict=False):
            if merge == Merge() and get_type(variable).dtype.itemsize >= 4:  # narrow parts would be rounded once more
                level = kinds[variable].level - 1
                _, merged = find_smallest(variable, level)
                if merged != [variable]:
                    moved[place] = keep_part(moved[place], variable)
                    compute_in_shards(variable, level, merged)
    return moved


def is_multiple(equation: Equation, variable: core.Var, kinds: dict[core.Var, Kind], level: int) -> bool:
    """Whether an equation multiplies a value by what is the same everywhere, and known before its parts."""
    others = [atom for atom in equation.whole.invars if atom is not variable]
    if len(others) != len(equation.whole.invars) - 1 or get_dtype(equation.whole.outvars[0]) != get_dtype(variable):
        return False
    if equation.name in MOVES:
        return not others
    if equation.name not in ("mul", "dot_general"):
        return False
    known = [kinds[other] for other in list_variables(others)]
    return all(isinstance(kind, Everywhere) and kind.level <= level for kind in known)


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
