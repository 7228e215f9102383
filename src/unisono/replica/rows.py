"""Whether what a function makes of a batch has rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def by_rows(function: Callable[..., Any], *batch: Any) -> bool:
    """Whether the first axis of what `function` returns counts the rows of its arguments: it grows with them.

    A replica with three rows and a function that returns three numbers for any batch must not be taken for one another.
    """

    def first_axis(more: int) -> int | None:
        longer = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0] + more, *a.shape[1:]), a.dtype), batch)
        shape = jax.eval_shape(function, *longer).shape
        return shape[0] if shape else None

    arrays = jax.tree.leaves(batch)
    if any(not array.shape for array in arrays):
        return False
    here, there = first_axis(0), first_axis(1)
    return here is not None and there is not None and there > here
