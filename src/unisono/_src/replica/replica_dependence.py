"""Values that are the same for all replicas: the program that computes them shows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import jax
import numpy as np

from unisono._src.jax_private.jaxprs import drop_unneeded
from unisono._src.typed_jax import make_jaxpr
from unisono._src.typing import AnyArray, Array, PyTree

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address of a function in memory, which differs from trace to trace."""


def are_same_for_all(compute: Callable[[PyTree, PyTree], list[Array]], shared: PyTree, owns: Sequence[PyTree]) -> bool:
    """Return whether `compute(shared, own)` uses nothing of `own`, and is the same program for each of `owns`.

    Args:
        compute: A function that can be traced.
        shared: The inputs that all replicas share, as shapes.
        owns: The inputs of one replica, as shapes: for some number of rows, and for another one.
    """
    programs = [trace_used(compute, shared, own) for own in owns]
    texts, constants, uses_own = zip(*programs, strict=True)
    same = all(len(values) == len(constants[0]) and all(map(np.array_equal, values, constants[0])) for values in constants)
    return same and len(set(texts)) == 1 and not any(uses_own)


def trace_used(compute: Callable[[PyTree, PyTree], list[Array]], shared: PyTree, own: PyTree) -> tuple[str, list[AnyArray], bool]:
    """Return (the text of the program without equations that its results do not need, its constants, whether it uses `own`)."""
    program = make_jaxpr(compute)(shared, own)
    reduced, used = drop_unneeded(program, [True] * len(program.jaxpr.outvars))
    return ADDRESS.sub("", str(reduced.jaxpr)), reduced.consts, any(used[len(jax.tree.leaves(shared)) :])
