"""Replica code in a program: a copy of its equations that each replica computes on its own rows, as they were traced for these.

A loop's function is traced for the whole batch, which says what state and metrics become. What replicas add up, and what they return, is made
of their own rows: of a copy of the equations behind it, in a scope of its own. The compiler takes equal equations of both for one.
"""

from __future__ import annotations

from jax.extend import core

from unisono._src.jax_private.jaxprs import enter_scope
from unisono._src.marks import OUTPUT, REPLICA_SCOPE, SUM, is_marked
from unisono._src.operands import Atom, get_type, list_variables


def copy_for_replicas(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return a program without calls, with copies of the equations that make what replicas add up or return."""
    equations = program.jaxpr.eqns
    wanted: set[core.Var] = set()
    copied: set[int] = set()
    for place in reversed(range(len(equations))):
        equation = equations[place]
        if is_of_replica(equation) or not wanted.isdisjoint(equation.outvars):
            copied.add(place)
            wanted.update(list_variables(equation.invars))
    names: dict[core.Var, core.Var] = {}

    def rename(atom: Atom) -> Atom:
        return atom if isinstance(atom, core.Literal) else names.get(atom, atom)

    both: list[core.JaxprEqn] = []
    for place, equation in enumerate(equations):
        if not is_of_replica(equation):
            both.append(equation)
        if place in copied:
            copy = enter_scope(equation, REPLICA_SCOPE).replace(invars=list(map(rename, equation.invars)))
            if not is_of_replica(equation):
                names |= {variable: core.Var(get_type(variable)) for variable in equation.outvars}
                copy = copy.replace(outvars=[names[variable] for variable in equation.outvars])
            both.append(copy)
    return core.ClosedJaxpr(program.jaxpr.replace(eqns=both), program.consts)


def is_of_replica(equation: core.JaxprEqn) -> bool:
    """Return whether an equation marks what is a replica's own."""
    return is_marked(equation, SUM) or is_marked(equation, OUTPUT)
