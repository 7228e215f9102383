"""Marks in a traced program: equations that change nothing, and scopes, which tell how a step is cut.

A mark is an equation `name`, whose value is told beside the results, or has a meaning where the step is cut. A scope stands in the names of
equations.
"""

from __future__ import annotations

from jax.extend import core

GRADIENT, LOSS = "unisono gradient", "unisono loss"
"""The names of values that are told; that of a gradient goes on with its number."""
SUM = "unisono sum"
"""What replicas add up: the value of each replica, the sum of which is the same everywhere."""
OUTPUT = "unisono output"
"""What each replica returns; the name goes on with its number."""
REPLICA = "unisono replica"
"""The number of the replica, in place of the marked one."""

LAYER_SCOPE = "unisono_local"
"""Layers whose statistics are a replica's own."""
REPLICA_SCOPE = "unisono_replica"
"""Code that each replica runs on its rows."""
BATCH_SCOPE = "unisono_batch"
"""What is made of the whole batch, also in the code of replicas."""


def is_marked(equation: core.JaxprEqn, name: str) -> bool:
    """Return whether an equation is a mark whose name begins so."""
    return equation.primitive.name == "name" and str(equation.params["name"]).startswith(name)


def find_marked(program: core.Jaxpr, name: str) -> list[core.Var]:
    """Return the values that are marked with names that begin so, in the order of the names; of several with one name, the first.

    The gradient of a mark is a mark, too, and comes after it.
    """
    found: dict[str, core.Var] = {}
    for equation in program.eqns:
        if is_marked(equation, name):
            found.setdefault(equation.params["name"], equation.outvars[0])
    return [found[mark] for mark in sorted(found, key=lambda mark: (len(mark), mark))]


def is_in_layer(scopes: str) -> bool:
    """Return whether the scopes of an equation are those of a layer whose statistics are a replica's own."""
    return scopes.rfind(LAYER_SCOPE) > scopes.rfind(BATCH_SCOPE)


def is_in_replica(scopes: str) -> bool:
    """Return whether the scopes of an equation are those of a replica's code."""
    return REPLICA_SCOPE in scopes and not sees_batch(scopes)


def sees_batch(scopes: str) -> bool:
    """Return whether the scopes of an equation are those of a replica's code that sees the whole batch."""
    return REPLICA_SCOPE in scopes and scopes.rfind(BATCH_SCOPE) > scopes.rfind(LAYER_SCOPE)
