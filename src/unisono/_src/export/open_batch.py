"""Whether a forward pass that was traced for any number of rows is that of every number of rows.

Where Python code asks whether an open number is 1, or even, JAX answers no: the file would hold one branch for all batches, in
silence. Where it asks which of two numbers is the larger one, JAX raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from unisono._src.export.input_signature import Inputs

ROWS = (101, 106)
"""An odd number and an even one, which no other length is likely to be."""
LENGTH = 64
"""Of what else is left open."""


def differ(forward: Callable[..., Any], variables: list[Any], inputs: Inputs) -> bool:
    """Whether the operations of one number of rows are others than those of another, or a single row has results of another rank.

    Args:
        forward: The function that is exported.
        variables: The variables' shapes and dtypes.
        inputs: What it takes.
    """
    found = []
    with contextlib.suppress(Exception):  # not every model takes a length of 64; what all lengths fail at is said elsewhere
        found = [jax.make_jaxpr(forward)(variables, inputs.of_rows(rows, LENGTH)) for rows in (*ROWS, 1)]
    if not found:
        return False
    one, other, single = found
    ranks = [[len(v.aval.shape) for v in program.jaxpr.outvars] for program in (one, single)]
    return list(operations(one.jaxpr)) != list(operations(other.jaxpr)) or ranks[0] != ranks[1]


def operations(program: Jaxpr) -> Iterator[str]:
    for equation in program.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from operations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
