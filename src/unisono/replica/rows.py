"""Whether what a function makes of a batch has rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def by_rows(function: Callable[..., Any], *batch: Any) -> bool:
    """Return whether the first axis of what `function` returns counts the rows of its arguments: it grows with them.

    A replica with three rows and a function that returns three numbers for any batch must not be taken for one another. Twice the rows are
    tried, since a function may take them in pairs or in triplets.
    """

    def first_axis(times: int) -> int | None:
        longer = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0] * times, *a.shape[1:]), a.dtype), batch)
        shape = jax.eval_shape(function, *longer).shape
        return shape[0] if shape else None

    if any(not array.shape for array in jax.tree.leaves(batch)):
        return False
    here, there = first_axis(1), first_axis(2)
    return here is not None and there is not None and there > here
