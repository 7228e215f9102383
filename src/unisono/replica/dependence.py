"""Whether a number depends on a replica's rows: read off the program that makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import partial_eval


def depend_on_rows(function: Callable[..., list[Any]], same_for_all: Any, *of_replica: Any) -> list[bool]:
    """Return, for each array that `function(same_for_all, *of_replica)` returns, whether anything of the replica reaches it.

    >>> depend_on_rows(lambda weight, x: [2 * weight, weight * x.sum()], jax.numpy.ones(3), jax.numpy.ones(4))
    [False, True]
    """
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (same_for_all, *of_replica))
    program = jax.make_jaxpr(function)(*shapes).jaxpr
    first = len(jax.tree.leaves(same_for_all))

    def reaches(place: int) -> bool:
        wanted = [index == place for index in range(len(program.outvars))]
        return any(partial_eval.dce_jaxpr(program, wanted)[1][first:])

    return [reaches(place) for place in range(len(program.outvars))]
