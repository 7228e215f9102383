"""Marks in a program: equations that change nothing, whose values are told beside the results."""

from __future__ import annotations

from jax.extend import core


def find_marked(program: core.Jaxpr, name: str) -> list[core.Var]:
    """Return the values that are marked with names that begin so, in the order of the names; of several with one name, the first.

    The gradient of a mark is a mark, too, and comes after it.
    """
    found: dict[str, core.Var] = {}
    for equation in program.eqns:
        if equation.primitive.name == "name" and str(equation.params["name"]).startswith(name):
            found.setdefault(equation.params["name"], equation.outvars[0])
    return [found[mark] for mark in sorted(found, key=lambda mark: (len(mark), mark))]
