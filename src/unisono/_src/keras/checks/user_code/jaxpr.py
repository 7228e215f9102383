"""Questions about jaxprs: what they hold, and what their results depend on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jax.extend import core

from unisono._src.programs.operands import Atom, list_variables
from unisono._src.programs.private.jaxprs import close_program, drop_unneeded
from unisono._src.typing import AnyArray

COLLECTIVES = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "axis_index",
    "shard_map", "xla_pmap", "pvary",
}  # fmt: skip


def list_behind(program: core.Jaxpr, targets: Iterable[Atom]) -> list[core.JaxprEqn]:
    """List the equations that lead to the targets."""
    needed = set(list_variables(targets))
    equations: list[core.JaxprEqn] = []
    for equation in reversed(program.eqns):
        if not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed.update(list_variables(equation.invars))
    return equations[::-1]


class Origins(NamedTuple):
    """Arguments and constants that some results depend on."""

    arguments: set[int]
    """Positions among the jaxpr's arguments."""
    constants: list[AnyArray]
    """Arrays in the jaxpr that are no arguments."""


def find_origins(program: core.ClosedJaxpr, results: Collection[int]) -> Origins:
    """Find the arguments and constants that these results depend on. Results are given by their positions."""
    wanted = [position in results for position in range(len(program.jaxpr.outvars))]
    reduced, needed = drop_unneeded(program, wanted)
    return Origins({position for position, is_needed in enumerate(needed) if is_needed}, reduced.consts)


def find_constants(program: core.ClosedJaxpr) -> list[AnyArray]:
    """Find the arrays in a jaxpr that are no arguments. Single numbers are left out."""
    return [constant for nested in walk_programs(program) for constant in nested.consts if np.shape(constant)]


def find_unmarked_constants(program: core.ClosedJaxpr, mark: str) -> list[AnyArray]:
    """Find the constants that an equation without the mark reads.

    Constants that are results count too. Single numbers are left out.
    """
    unmarked = [equation for equation in program.jaxpr.eqns if mark not in str(equation.source_info.name_stack)]
    read = set(list_variables([*(variable for equation in unmarked for variable in equation.invars), *program.jaxpr.outvars]))
    constants = zip(program.jaxpr.constvars, program.consts, strict=True)
    return [constant for variable, constant in constants if variable in read and np.shape(constant)]


def check_collectives(name: str, program: core.ClosedJaxpr) -> None:
    for equation in walk_equations(program):
        if equation.primitive.name in COLLECTIVES:
            raise ValueError(
                f"The function {name!r} uses the collective {equation.primitive.name!r}, but replicas of one device run one after "
                f"another: they have nobody to talk to. Return the value, and add over replicas after strategy.run, by "
                f'strategy.reduce("SUM", value, axis=None).'
            )


def walk_programs(program: core.ClosedJaxpr) -> Iterator[core.ClosedJaxpr]:
    """Yield the jaxpr and all jaxprs that are nested in it."""
    yield program
    for equation in program.jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                    yield from walk_programs(close_program(inner))


def walk_equations(program: core.ClosedJaxpr) -> Iterator[core.JaxprEqn]:
    return (equation for nested in walk_programs(program) for equation in nested.jaxpr.eqns)


def has_float16(program: core.ClosedJaxpr) -> bool:
    results = (result.aval for equation in walk_equations(program) for result in equation.outvars)
    return any(getattr(result, "dtype", None) == "float16" for result in results)
