"""A warning of batches that leave replicas without rows. Their size may be meant for one replica."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from unisono._src.engine.global_batch import Position


class SmallBatches:
    """A check of each batch, which warns once of small ones.

    It warns when two in a row are too small: one alone may be the last of a pass.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._small: Position | None = None
        """The position of the last batch, if that was too small."""
        self._warned = False

    def note(self, rows: int, position: Position | None, sizes: Sequence[int] | None) -> None:
        """Note a batch. `sizes` is given if each replica has brought its own rows."""
        before, self._small = self._small, None
        if rows >= self._replicas or position is None or sizes is not None:
            return
        self._small = position
        if not self._warned and before == (position[0], position[1] - 1):
            self._warned = True
            warnings.warn(
                f"Batches of {rows} rows for {self._replicas} replicas: replicas without rows have nothing to do. Batches are global ones "
                f"here: if these are meant for one replica, make them {self._replicas} times as large.",
                stacklevel=4,
            )
