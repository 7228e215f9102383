"""Functions of a batch: does the output have rows?"""

from __future__ import annotations

from collections.abc import Hashable

import jax
import jax.numpy as jnp

from unisono._src.replica.row_coupling import couples_rows, warn_of_coupling
from unisono._src.typing import PyTree, UserFunction


class OutputRows:
    """Answers whether the first axis of a function's output counts rows, with one trial for each function and batch of some shapes.

    A function that returns three numbers for any batch must not be mistaken for one that returns a number for each of three rows. Twice the
    rows are tried, since a function may take rows in pairs or in triplets.
    """

    def __init__(self, eager: bool = False, alone: bool = False) -> None:
        """`eager`: functions are called with arrays, since code that is not compiled need not be traceable.
        `alone`: one replica has all rows."""
        self._eager = eager
        self._alone = alone
        self._answers: dict[Hashable, bool] = {}

    def __call__(self, owner: object, function: UserFunction, *batch: PyTree) -> bool:
        """Return whether the output of `function` grows with the rows of its arguments. `owner` is the loss or the metric of the function."""
        key = id(owner), tuple((array.shape, str(array.dtype)) for array in jax.tree.leaves(batch))
        if key not in self._answers:
            self._answers[key] = self._grows(function, batch)
        return self._answers[key]

    def warn_if_coupled(self, owner: object, function: UserFunction, *batch: PyTree) -> None:
        """Warn once of a loss whose value does not follow from its values on parts of the rows."""
        key = id(owner), "coupled"
        if key not in self._answers and not self._alone:
            self._answers[key] = couples_rows(function, batch)
            if self._answers[key]:
                name = getattr(owner, "name", None) or getattr(owner, "__name__", type(owner).__name__)
                warn_of_coupling(f"The loss {name!r}")

    def was_warned(self, owner: object) -> bool:
        """Return whether `warn_of_coupled_rows` has warned of this loss."""
        return self._answers.get((id(owner), "coupled"), False)

    def _grows(self, function: UserFunction, batch: tuple[PyTree, ...]) -> bool:
        if any(not array.shape for array in jax.tree.leaves(batch)):
            return False
        once, twice = (self._first_axis(function, batch, times) for times in (1, 2))
        return once is not None and twice is not None and twice > once

    def _first_axis(self, function: UserFunction, batch: tuple[PyTree, ...], times: int) -> int | None:
        """Return the length of the first axis of the output for `times` as many rows; None for one number."""
        if self._eager:
            shape = function(*jax.tree.map(lambda array: jnp.concatenate([array] * times), batch)).shape
        else:
            longer = jax.tree.map(
                lambda array: jax.ShapeDtypeStruct((array.shape[0] * times, *array.shape[1:]), array.dtype), batch
            )
            shape = jax.eval_shape(function, *longer).shape
        return shape[0] if shape else None
