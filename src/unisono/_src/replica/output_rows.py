"""Whether what a function makes of a batch has rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from unisono._src.replica.row_coupling import couples_rows, warn_of_coupling


class ByRows:
    """Finds, once for each function and batch of some shapes, whether the first axis of what the function returns counts rows.

    A replica with three rows and a function that returns three numbers for any batch must not be taken for one another. Twice the rows are
    tried, since a function may take them in pairs or in triplets.
    """

    def __init__(self, eager: bool = False, alone: bool = False) -> None:
        """`eager`: whether functions are called with arrays, since code that is not compiled need not be one that can be traced.
        `alone`: whether one replica has all rows."""
        self._eager = eager
        self._alone = alone
        self._found: dict[Hashable, bool] = {}

    def __call__(self, owner: Any, function: Callable[..., Any], *batch: Any) -> bool:
        """Return whether what `function` returns grows with the rows of its arguments. `owner` is the loss or the metric that has it."""
        key = id(owner), tuple((array.shape, str(array.dtype)) for array in jax.tree.leaves(batch))
        if key not in self._found:
            self._found[key] = self._grows(function, batch)
        return self._found[key]

    def warn_if_coupled(self, owner: Any, function: Callable[..., Any], *batch: Any) -> None:
        """Say once that a loss is not made of what it is on parts of the rows."""
        key = id(owner), "coupled"
        if key not in self._found and not self._alone:
            self._found[key] = couples_rows(function, batch)
            if self._found[key]:
                name = getattr(owner, "name", None) or getattr(owner, "__name__", type(owner).__name__)
                warn_of_coupling(f"The loss {name!r}")

    def is_coupled(self, owner: Any) -> bool:
        """Return whether `warn_if_coupled` has said so of this loss."""
        return self._found.get((id(owner), "coupled"), False)

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
