"""Whether what a function makes of a batch has rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp


class ByRows:
    """Finds, once for each function and batch of some shapes, whether the first axis of what the function returns counts rows.

    A replica with three rows and a function that returns three numbers for any batch must not be taken for one another. Twice the rows are
    tried, since a function may take them in pairs or in triplets.
    """

    def __init__(self, eager: bool = False) -> None:
        """`eager`: whether functions are called with arrays, since code that is not compiled need not be one that can be traced."""
        self._eager = eager
        self._found: dict[Hashable, bool] = {}

    def __call__(self, owner: Any, function: Callable[..., Any], *batch: Any) -> bool:
        """Return whether what `function` returns grows with the rows of its arguments. `owner` is the loss or the metric that has it."""
        key = id(owner), tuple((array.shape, str(array.dtype)) for array in jax.tree.leaves(batch))
        if key not in self._found:
            self._found[key] = self._grows(function, batch)
        return self._found[key]

    def _grows(self, function: Callable[..., Any], batch: Any) -> bool:
        if any(not array.shape for array in jax.tree.leaves(batch)):
            return False
        here, there = (self._first_axis(function, batch, times) for times in (1, 2))
        return here is not None and there is not None and there > here

    def _first_axis(self, function: Callable[..., Any], batch: Any, times: int) -> int | None:
        if self._eager:
            shape = function(*jax.tree.map(lambda a: jnp.concatenate([a] * times), batch)).shape
        else:
            longer = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0] * times, *a.shape[1:]), a.dtype), batch)
            shape = jax.eval_shape(function, *longer).shape
        return shape[0] if shape else None
