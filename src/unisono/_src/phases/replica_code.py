"""Replica code in a program: a copy of its equations that each replica computes on its own rows, as they were traced for these.

A loop's function is traced for the whole batch, which says what state and metrics become. What replicas add up, and what they return, is made
of their own rows: of a copy of the equations behind it, in a scope of its own. A shard computes what is the same in both only once.
"""

from __future__ import annotations

from jax.extend import core

from unisono._src.jax_private.jaxprs import enter_scope
from unisono._src.marks import OUTPUT, REPLICA, REPLICA_SCOPE, SUM, is_marked
from unisono._src.operands import Atom, get_type, list_variables
from unisono._src.phases.kinds import Everywhere, Kind
from unisono._src.phases.twins import Equation, Twins, has_same_literals


def copy_for_replicas(twins: Twins, inputs: list[Kind]) -> Twins:
    """Return twins with copies of the equations that make what replicas add up or return. `inputs` are the kinds of the inputs."""
    of_rows = find_of_rows(twins, inputs)
    copied = find_behind_marks(twins) & of_rows
    names: dict[core.Var, core.Var] = {}

    def rename(atom: Atom) -> Atom:
        return atom if isinstance(atom, core.Literal) else names.get(atom, atom)

    equations: list[Equation] = []
    for place, equation in enumerate(twins.equations):
        is_mark = is_of_replica(equation.whole)
        if not is_mark:
            equations.append(equation)
        if is_mark or place in copied:
            copy = enter_scope(equation.whole, REPLICA_SCOPE).replace(invars=list(map(rename, equation.whole.invars)))
            if not is_mark:
                names |= {variable: core.Var(get_type(variable)) for variable in equation.whole.outvars}
                copy = copy.replace(outvars=[names[variable] for variable in equation.whole.outvars])
            equations.append(equation._replace(whole=copy))
    shapes = twins.shapes | {copy: twins.shapes[variable] for variable, copy in names.items()}
    return twins._replace(equations=equations, shapes=shapes)


def find_behind_marks(twins: Twins) -> set[int]:
    """Return the places of the equations behind what is marked as a replica's own."""
    wanted: set[core.Var] = set()
    found: set[int] = set()
    for place in reversed(range(len(twins.equations))):
        equation = twins.equations[place].whole
        if is_of_replica(equation) or not wanted.isdisjoint(equation.outvars):
            found.add(place)
            wanted.update(list_variables(equation.invars))
    return found


def find_of_rows(twins: Twins, inputs: list[Kind]) -> set[int]:
    """Return the places of the equations whose results may be others in each replica: of rows, of their number, of the replica's number."""
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
    """Return whether an equation marks what is a replica's own."""
    return is_marked(equation, SUM) or is_marked(equation, OUTPUT)
