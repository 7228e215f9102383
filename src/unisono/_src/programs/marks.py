"""Marks in a traced program, which tell how a step is cut.

A mark is an equation `name` that changes nothing. Its value is given out beside the results, or the step is cut there. A scope stands in
the names of equations.
"""

from __future__ import annotations

from jax.extend import core

GRADIENT, LOSS = "unisono gradient", "unisono loss"
"""The names of values that are given out. A gradient's name ends with its number."""
SUM = "unisono sum"
"""A value that replicas add up. Its sum is the same everywhere."""
OUTPUT = "unisono output"
"""A result of each replica. The name ends with its number."""
REPLICA = "unisono replica"
"""Stands for the number of the replica, in place of the marked number."""

LAYER_SCOPE = "unisono_local"
"""The scope of layers whose statistics are a replica's own."""
REPLICA_SCOPE = "unisono_replica"
"""The scope of code that each replica runs on its rows."""
BATCH_SCOPE = "unisono_batch"
"""The scope of values of the whole batch, also in the code of replicas."""


def is_marked(equation: core.JaxprEqn, name: str) -> bool:
    """Whether an equation is a mark whose name begins so."""
    return equation.primitive.name == "name" and str(equation.params["name"]).startswith(name)


def find_marked(program: core.Jaxpr, name: str) -> list[core.Var]:
    """Find the values of marks whose names begin so.

    They are in the order of the names. If several have one name, it is the first: the gradient of a mark is a mark, too, and comes after
    it.
    """
    found: dict[str, core.Var] = {}
    for equation in program.eqns:
        if is_marked(equation, name):
            found.setdefault(equation.params["name"], equation.outvars[0])
    return [found[mark] for mark in sorted(found, key=lambda mark: (len(mark), mark))]


def is_in_layer(scopes: str) -> bool:
    """Whether these scopes are of a layer with a replica's own statistics."""
    return scopes.rfind(LAYER_SCOPE) > scopes.rfind(BATCH_SCOPE)


def is_in_replica(scopes: str) -> bool:
    """Whether these scopes are of a replica's code."""
    return REPLICA_SCOPE in scopes and not sees_batch(scopes)


def sees_batch(scopes: str) -> bool:
    """Whether these scopes are of replica code that sees the whole batch."""
    return REPLICA_SCOPE in scopes and scopes.rfind(BATCH_SCOPE) > scopes.rfind(LAYER_SCOPE)
