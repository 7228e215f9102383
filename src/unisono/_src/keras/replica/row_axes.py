"""Whether losses and values for means have an axis of rows.

Values of rows grow with the rows, so the shape for some rows is compared with that for another number of rows. A sum over the
rows of shape (1,) does not grow. Of one row, `ops.squeeze` removes the axis of rows, which is there for more rows. What code
hands over is numbered in the order of the calls: a trace for other rows has the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from unisono._src.typing import AnyArray, Array, Shape


class RowAxes:
    """The shapes of what a trace hands over, in call order. They tell values of rows from single numbers."""

    def __init__(self, rows: int = 1, others: Sequence[Shape] | None = None) -> None:
        """Begin a record.

        Args:
            rows: Those of the trace.
            others: `noted` of a trace for another number of rows; None where there is no such trace.
        """
        self.noted: list[Shape] = []
        self._rows = rows
        self._others = others or ()

    def find_rows(self, values: AnyArray, need_rows: bool = False) -> Array | None:
        """Find values of rows; None for a number of any shape. The axis of one row is put back if the code has removed it.

        `need_rows`: they are values of rows, or an error.
        """
        shape = tuple(values.shape)
        place = len(self.noted)
        self.noted.append(shape)
        if place < len(self._others):
            other = self._others[place]
            has_rows = other != shape
            is_squeezed = len(other) > len(shape)
        else:
            has_rows = need_rows or bool(shape) if self._rows == 1 else math.prod(shape) > 1
            is_squeezed = not shape
        if not has_rows:
            return None
        rows = jnp.asarray(values)
        return lax.expand_dims(rows, (0,)) if is_squeezed else rows
