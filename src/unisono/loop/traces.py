"""What a traced program holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core

COLLECTIVES = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "axis_index",
    "shard_map", "xla_pmap", "pvary",
}  # fmt: skip


def constants_of(program: core.ClosedJaxpr) -> list[Any]:
    """The arrays that the program was given by nobody, without numbers."""
    return [constant for part in parts_of(program) for constant in part.consts if getattr(constant, "shape", ())]


def check_collectives(name: str, program: core.ClosedJaxpr) -> None:
    for part in parts_of(program):
        for equation in part.jaxpr.eqns:
            if equation.primitive.name in COLLECTIVES:
                raise ValueError(
                    f"The function {name!r} uses the collective {equation.primitive.name!r}, but replicas of one device run one after "
                    f"another: they have nobody to talk to. Return the value, and add over replicas after strategy.run, by "
                    f'strategy.reduce("SUM", value, axis=None).'
                )


def parts_of(program: core.ClosedJaxpr) -> Iterator[core.ClosedJaxpr]:
    """The program and all that are nested in it."""
    yield program
    for equation in program.jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if isinstance(inner, core.ClosedJaxpr):
                    yield from parts_of(inner)
                elif isinstance(inner, core.Jaxpr):
                    yield from parts_of(core.ClosedJaxpr(inner, ()))


def has_float16(program: core.ClosedJaxpr) -> bool:
    results = (result.aval for part in parts_of(program) for equation in part.jaxpr.eqns for result in equation.outvars)
    return any(getattr(result, "dtype", None) == "float16" for result in results)
