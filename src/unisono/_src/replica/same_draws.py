"""Random numbers for rows that are the same in all replicas: those of a fixed seed, or of a key that all replicas get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jax.extend import core

from unisono._src.inlining import inline_calls
from unisono._src.operands import find_dependents, get_shape
from unisono._src.typing import Shape
from unisono._src.xla.rewrite.equations import drop_names, drop_unread

DRAWS = ("random_bits", "rng_bit_generator", "rng_uniform")
"""Primitives that make random numbers of a key or a state."""


def list_same_draws(program: core.Jaxpr, differing: Iterable[core.Var]) -> list[Shape]:
    """Return the shapes of random numbers that depend on none of the variables in which replicas and steps differ."""
    dependents = find_dependents(program, differing)
    draws = (equation.outvars[0] for equation in program.eqns if equation.primitive.name in DRAWS)
    return [get_shape(drawn) for drawn in draws if drawn not in dependents]


def list_constant_draws(program: core.ClosedJaxpr, counted: Sequence[bool] | None = None) -> list[Shape]:
    """Return the shapes of random numbers that depend on no argument of a program.

    `counted` tells of each result whether random numbers count that it alone is made of; without it, all count.
    """
    flat = inline_calls(program).jaxpr
    if counted is not None:
        results = [result for result, counts in zip(flat.outvars, counted, strict=True) if counts]
        flat = drop_unread(flat.replace(outvars=results, debug_info=drop_names(flat)))
    return list_same_draws(flat, flat.invars)


def find_draw_for_rows(draws_of: Callable[[int], Sequence[Shape]], rows: int) -> Shape | None:
    """Return the shape of the first random numbers of which there are more for more rows; `draws_of` lists the shapes for a number of rows."""
    drawn = draws_of(rows)
    if not any(shape and shape[0] and not shape[0] % rows for shape in drawn):
        return None
    try:
        drawn_for_more = draws_of(2 * rows)
    except Exception:  # of the user's code, which was not written for more rows
        return None
    return next((one for one, more in zip(drawn, drawn_for_more, strict=False) if one and more[:1] == (2 * one[0],)), None)
