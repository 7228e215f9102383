"""The check that a forward pass traced for any number of rows computes the same for every number of rows.

Where Python code asks whether an open number is 1, or even, JAX answers no: the file would silently hold one branch for all
batches. Where the code asks which of two numbers is larger, JAX raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from unisono._src.export.input_signature import InputSignature
from unisono._src.typing import Array, Outputs

ROWS = (101, 106)
"""An odd and an even number of rows, which no other length is likely to be."""
LENGTH = 64
"""The length in place of all other open lengths."""


def depends_on_rows(
    forward: Callable[[list[Array], list[Array]], Outputs], variables: list[jax.ShapeDtypeStruct], inputs: InputSignature
) -> bool:
    """Return whether the operations depend on the number of rows, or a single row has results of another rank.

    Args:
        forward: The function that is exported.
        variables: The variables' shapes and dtypes.
        inputs: The inputs of the model.
    """
    traces = []
    with contextlib.suppress(
        Exception
    ):  # not every model takes a length of 64; a model that fails at every length is refused elsewhere
        traces = [jax.make_jaxpr(forward)(variables, inputs.of_rows(rows, LENGTH)) for rows in (*ROWS, 1)]
    if not traces:
        return False
    odd, even, single = traces
    ranks = [[len(variable.aval.shape) for variable in trace.jaxpr.outvars] for trace in (odd, single)]
    return list(list_operations(odd.jaxpr)) != list(list_operations(even.jaxpr)) or ranks[0] != ranks[1]


def list_operations(program: Jaxpr) -> Iterator[str]:
    """Yield the names of the operations, those of inner programs too."""
    for equation in program.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from list_operations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
