"""A check that losses with axes have values of examples: the engine takes each for one, and divides by the number of them in all replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from unisono._src.checks.user_code.provenance import Provenance
from unisono._src.operands import get_shape
from unisono._src.typing import Shape


def find_fixed_loss(sources: Provenance, trace_of: Callable[[int], Provenance], size: int) -> Shape | None:
    """Return the shape of a loss with an axis whose shape is the same for any number of rows; None where there is no such loss.

    Args:
        sources: The function, traced on a replica's rows.
        trace_of: Traces the function on another number of rows.
        size: The number of the replica's rows.
    """
    gave = set(sources.list_noted("gave"))
    vectors = sources.list_noted("vector")
    if all(vector in gave and get_shape(vector)[:1] == (size,) for vector in vectors):
        return None
    try:
        vectors_for_more = trace_of(2 * size).list_noted("vector")
    except Exception:  # of the user's code, which was not written for more rows
        return None
    pairs = zip(vectors, vectors_for_more, strict=False)
    return next((get_shape(vector) for vector, other in pairs if get_shape(vector) == get_shape(other)), None)


def warn_of_fixed_loss(name: str, shape: Shape, replicas: int) -> None:
    """Warn of a loss with an axis that has this shape for any number of rows."""
    warnings.warn(
        f"The function {name!r} makes a loss of shape {shape} of any number of rows, and the engine takes its values for those of examples: "
        f"it divides their sum by the number of values in all {replicas} replicas. A sum over a replica's rows becomes {replicas} times too "
        f"small. Return one value for each example; or, if each value is a sum over the rows, one number, ops.mean(values): the numbers of "
        f"replicas are added.",
        stacklevel=2,
    )
