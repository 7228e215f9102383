"""Values of a replica of one row, whose axis of rows the code has removed, as `ops.squeeze` does: for more rows it is there.

What code hands over, as losses and as values for means, is numbered in the order of the calls. A trace for two rows tells which of them
have rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from unisono._src.typing import AnyArray


class RowAxes:
    """The record of whether values that a trace hands over have axes, in the order of the calls, and of whether those of more rows have."""

    def __init__(self, known: Sequence[bool] | None = None, is_one_row: bool = False) -> None:
        """`known` is `noted` of a trace for two rows; None where this trace has more rows itself, or where there is no such trace."""
        self.noted: list[bool] = []
        self._known = known
        self._is_one_row = is_one_row

    def restore(self, values: AnyArray, need_rows: bool = False) -> AnyArray:
        """Return values that are handed over, with the axis of one row if the code has removed it.

        `need_rows`: they are values of rows, or an error.
        """
        has_axes = bool(values.shape)
        place = len(self.noted)
        self.noted.append(has_axes)
        is_needed = need_rows and self._is_one_row and self._known is None
        is_known = self._known is not None and place < len(self._known) and self._known[place]
        return lax.expand_dims(jnp.asarray(values), (0,)) if not has_axes and (is_needed or is_known) else values
