"""A check that losses with axes have values of examples: the engine takes each for one, and divides by the number of them in all replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from unisono._src.checks.user_code.provenance import Provenance
from unisono._src.operands import get_shape


def warn_of_fixed_loss(name: str, sources: Provenance, trace_of: Callable[[int], Provenance], size: int, replicas: int) -> bool:
    """Warn of a loss with an axis whose shape is the same for any number of rows, and return whether there is one.

    Args:
        name: The name of the function.
        sources: The function, traced on a replica's rows.
        trace_of: Traces the function on another number of rows.
        size: The number of the replica's rows.
        replicas: R.
    """
    gave = set(sources.list_noted("gave"))
    vectors = sources.list_noted("vector")
    if all(vector in gave and get_shape(vector)[:1] == (size,) for vector in vectors):
        return False
    try:
        vectors_for_more = trace_of(2 * size).list_noted("vector")
    except Exception:  # of the user's code, which was not written for more rows
        return False
    pairs = zip(vectors, vectors_for_more, strict=False)
    shape = next((get_shape(vector) for vector, other in pairs if get_shape(vector) == get_shape(other)), None)
    if shape is None:
        return False
    warnings.warn(
        f"The function {name!r} makes a loss of shape {shape} of any number of rows, and the engine takes its values for those of examples: "
        f"it divides their sum by the number of values in all {replicas} replicas. A sum over a replica's rows becomes {replicas} times too "
        f"small. Return one value for each example; or, if each value is a sum over the rows, one number, ops.mean(values): the numbers of "
        f"replicas are added.",
        stacklevel=2,
    )
    return True
