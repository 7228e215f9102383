"""Whether something is the same for all replicas: found in the program that computes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Of a function in memory, which differs from trace to trace."""


def are_same_for_all(compute: Callable[[Any, Any], list[Any]], shared: Any, owns: list[Any]) -> bool:
    """Return whether `compute(shared, own)` uses nothing of `own`, and is the same program for each of `owns`.

    Args:
        compute: A function that can be traced.
        shared: What all replicas have, in shapes.
        owns: What one replica has by itself, in shapes: of some number of rows, and of another one.
    """
    found = [used_program(compute, shared, own) for own in owns]
    texts, constants, uses_own = zip(*found, strict=True)
    same = all(len(of_one) == len(constants[0]) and all(map(np.array_equal, of_one, constants[0])) for of_one in constants)
    return same and len(set(texts)) == 1 and not any(uses_own)


def used_program(compute: Callable[[Any, Any], list[Any]], shared: Any, own: Any) -> tuple[str, list[Any], bool]:
    """Return (the program without what its results do not need, its constants, whether it uses something of `own`)."""
    program = jax.make_jaxpr(compute)(shared, own)
    reduced, used = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    read = {v for equation in reduced.eqns for v in equation.invars if not isinstance(v, core.Literal)} | {
        v for v in reduced.outvars if not isinstance(v, core.Literal)
    }
    constants = {v: value for v, value in zip(program.jaxpr.constvars, program.consts, strict=True) if v in read}
    text = ADDRESS.sub("", str(reduced.replace(constvars=list(constants))))
    return text, list(constants.values()), any(used[len(jax.tree.leaves(shared)) :])


def in_shapes(arrays: Any, times: int = 1) -> Any:
    """Return arrays in shapes, of `times` as many rows."""

    def shape_of(array: Any) -> jax.ShapeDtypeStruct:
        rows = tuple(length * times for length in array.shape[:1])
        return jax.ShapeDtypeStruct((*rows, *array.shape[1:]), array.dtype)

    return jax.tree.map(shape_of, arrays)
