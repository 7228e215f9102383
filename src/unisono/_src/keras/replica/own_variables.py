"""Variables of the user's own that replica code assigns.

A replica adds to them. Their values after the step follow from the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import keras

from unisono._src.keras.replica.used_variables import UsedVariables
from unisono._src.typing import Array, Values


class OwnVariables:
    """The variables to which replicas add, by their aggregation.

    It is "sum" or "mean". All others are what the code makes of all rows.
    """

    def __init__(self, variables: UsedVariables, is_own: Callable[[keras.Variable], bool]) -> None:
        """Find these variables. `is_own` tells whether a variable is the user's own, of no layer."""
        self._variables = variables.non_trainable
        self._replaced = variables.replaced
        self._added = [
            place
            for place in variables.assigned
            if is_own(self._variables[place]) and self._variables[place].aggregation in ("sum", "mean")
        ]
        """Their positions."""
        for place in self._added:
            check_has_sum(self._variables[place])

    def list_parts(self, before: Values, after: Values, row_fraction: Array) -> list[Array]:
        """List what a replica adds to each of them. It is the change, or the replica's part of the mean by rows."""
        parts: list[Array] = []
        for place in self._added:
            new = widen(after[place])
            is_mean = self._variables[place].aggregation == "mean"
            parts.append(new.astype(jnp.float32) * row_fraction if is_mean else new - self._find_base(place, before[place]))
        return parts

    def put_totals(self, before: Values, after: Values, totals: Sequence[Array]) -> Values:
        """Compute the values after the step.

        They follow from what the code makes of all rows, and from the sums of `list_parts`.
        """
        values = list(after)
        for place, total in zip(self._added, totals, strict=True):
            values[place] = (self._find_base(place, before[place]) + total).astype(before[place].dtype)
        return values

    @property
    def count(self) -> int:
        """The number of these variables."""
        return len(self._added)

    def _find_base(self, place: int, old: Array) -> Array:
        """The value to which replicas add. It is zero where their part is of new values alone."""
        is_sum = self._variables[place].aggregation == "sum"
        return widen(old) if is_sum and place not in self._replaced else jnp.zeros_like(widen(old))


def check_has_sum(variable: keras.Variable) -> None:
    """Refuse a sum over replicas of bools."""
    if jnp.issubdtype(variable.dtype, jnp.bool_):
        raise ValueError(
            f"The replica's code assigns {variable.path!r} of dtype bool with aggregation={variable.aggregation!r}, but bools have no sum. Make "
            f"it an integer, or write aggregation='only_first_replica'."
        )


def widen(value: Array) -> Array:
    """Convert small integers and bools to 32 bits."""
    return value.astype(jnp.int32) if not jnp.issubdtype(value.dtype, jnp.inexact) and value.dtype.itemsize < 4 else value
