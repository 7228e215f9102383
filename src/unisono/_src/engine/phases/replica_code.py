"""Replica code: equations that each replica computes on its own rows.

A loop's function is traced for the whole batch, which says what state and metrics become. What replicas add up, and what they
return, depends on their own rows alone. So the equations that lead to it are copied, in a scope of their own, as they were traced
for these rows. A shard computes only once what is the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax.extend import core

from unisono._src.engine.phases.kinds import Everywhere, Kind
from unisono._src.engine.phases.twins import Equation, Twins, has_same_literals
from unisono._src.programs.marks import OUTPUT, REPLICA, REPLICA_SCOPE, SUM, is_marked
from unisono._src.programs.operands import Atom, get_type, list_variables
from unisono._src.programs.private.jaxprs import enter_scope
from unisono._src.typed_jax import finfo


def copy_for_replicas(twins: Twins, inputs: list[Kind]) -> Twins:
    """Copy the equations that make what replicas add up or return. `inputs` are the kinds of the inputs."""
    of_rows = find_of_rows(twins, inputs)
    copied = find_behind_marks(twins) & of_rows
    names: dict[core.Var, core.Var] = {}

    def rename(atom: Atom) -> Atom:
        return atom if isinstance(atom, core.Literal) else names.get(atom, atom)

    makers = {variable: equation for equation in twins.equations for variable in equation.whole.outvars}
    equations: list[Equation] = []
    shapes = dict(twins.shapes)
    for place, equation in enumerate(twins.equations):
        is_mark = is_of_replica(equation.whole)
        if is_mark and is_marked(equation.whole, SUM) and (roundings := list_roundings(equation.whole.invars[0], makers)):
            mark, *after = put_sum_before(equation, roundings)
            shapes |= {one.whole.outvars[0]: shapes[equation.whole.outvars[0]] for one in (mark, *after)}
            whole = enter_scope(mark.whole, REPLICA_SCOPE).replace(invars=list(map(rename, mark.whole.invars)))
            equations += [mark._replace(whole=whole), *after]
            continue
        if not is_mark:
            equations.append(equation)
        if is_mark or place in copied:
            copy = enter_scope(equation.whole, REPLICA_SCOPE).replace(invars=list(map(rename, equation.whole.invars)))
            if not is_mark:
                names |= {variable: core.Var(get_type(variable)) for variable in equation.whole.outvars}
                copy = copy.replace(outvars=[names[variable] for variable in equation.whole.outvars])
            equations.append(equation._replace(whole=copy))
    shapes |= {copy: twins.shapes[variable] for variable, copy in names.items()}
    return twins._replace(equations=equations, shapes=shapes)


def list_roundings(value: Atom, makers: Mapping[core.Var, Equation]) -> list[Equation]:
    """List the conversions from a value's most precise form to itself. Empty where no digit is lost."""
    chain: list[Equation] = []
    digits = [count_digits(value)]
    while isinstance(value, core.Var) and value in makers and makers[value].name == "convert_element_type":
        chain.append(makers[value])
        (value,) = chain[-1].whole.invars
        digits.append(count_digits(value))
    place = max(range(len(digits)), key=lambda number: (digits[number], number))
    return chain[:place][::-1] if min(digits[: place + 1]) < digits[place] else []


def count_digits(value: Atom) -> int:
    """Count the binary digits of the dtype's fraction. 0 where it is no floating-point number."""
    dtype = get_type(value).dtype
    return int(finfo(dtype).nmant) if jnp.issubdtype(dtype, jnp.floating) else 0


def put_sum_before(mark: Equation, roundings: Sequence[Equation]) -> list[Equation]:
    """Move the mark of a sum before conversions. What replicas add up is then not rounded in each of them."""
    made: list[Equation] = []
    value = roundings[0].whole.invars[0]
    for equation in (mark, *roundings):
        is_last = equation is roundings[-1]
        result = (
            mark.whole.outvars[0] if is_last else core.Var(get_type(value if equation is mark else equation.whole.outvars[0]))
        )
        made.append(equation._replace(whole=equation.whole.replace(invars=[value], outvars=[result])))
        value = result
    return made


def find_behind_marks(twins: Twins) -> set[int]:
    """Find the equations that lead to a replica's marked values. They are given by their positions."""
    wanted: set[core.Var] = set()
    found: set[int] = set()
    for place in reversed(range(len(twins.equations))):
        equation = twins.equations[place].whole
        if is_of_replica(equation) or not wanted.isdisjoint(equation.outvars):
            found.add(place)
            wanted.update(list_variables(equation.invars))
    return found


def find_of_rows(twins: Twins, inputs: list[Kind]) -> set[int]:
    """Find the equations whose results may differ between replicas.

    They depend on rows, on the number of rows, or on the replica's number. They are given by their positions.
    """
    own = {variable for variable, kind in zip(twins.inputs, inputs, strict=True) if not isinstance(kind, Everywhere)}
    own |= twins.own_constants.keys()
    found: set[int] = set()
    for place, equation in enumerate(twins.equations):
        whole = equation.whole
        grows = not has_same_literals(equation) or any(twins.find_growing(variable) for variable in whole.outvars)
        if grows or is_marked(whole, REPLICA) or not own.isdisjoint(list_variables(whole.invars)):
            found.add(place)
            own.update(whole.outvars)
    return found


def is_of_replica(equation: core.JaxprEqn) -> bool:
    """Whether an equation marks what is a replica's own."""
    return is_marked(equation, SUM) or is_marked(equation, OUTPUT)
