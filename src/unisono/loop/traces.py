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


def divisors_of_sums(program: core.ClosedJaxpr) -> set[int]:
    """The whole numbers by which the program divides sums over everything: the constants of a mean written by hand."""
    return {divisor for part in parts_of(program) for divisor in _divisors(part.jaxpr)}


def _divisors(jaxpr: core.Jaxpr) -> Iterator[int]:
    sums = set()
    for equation in jaxpr.eqns:
        if not equation.outvars:  # of which nothing was left
            continue
        result, name = equation.outvars[0], equation.primitive.name
        sources = [v for v in equation.invars if not isinstance(v, core.Literal)]
        numbers = [v.val for v in equation.invars if isinstance(v, core.Literal)]
        if (name == "reduce_sum" and not getattr(result.aval, "shape", None)) or (
            name in ("convert_element_type", "neg") and sources and sources[0] in sums
        ):
            sums.add(result)
        elif name in ("div", "mul") and len(numbers) == 1 and sources and sources[0] in sums and float(numbers[0]) > 0:
            divisor = float(numbers[0]) if name == "div" else 1 / float(numbers[0])
            if divisor > 1.5 and abs(divisor - round(divisor)) < 1e-4 * divisor:
                yield round(divisor)
