"""State of the user's own layers that adds up over rows: replicas average what they add, so that it gets a part of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from unisono._src.replica.growth import SUM, Measurement


class AddedState:
    """The variables of which the user was warned."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def check(self, path: str, seen: Sequence[Measurement], tolerance: float) -> None:
        """Warn once of a variable whose change by rows is the sum of the changes by their parts."""
        if path not in self._warned and is_added_up(seen, tolerance):
            self._warned.add(path)
            warnings.warn(describe_added_state(path), stacklevel=2)


def is_added_up(seen: Sequence[Measurement], tolerance: float) -> bool:
    """Return whether an array on all rows is the sum of what it is on parts of them, wherever it is not zero on these."""
    telling = [measured for measured in seen if measured.is_telling and measured.has_parts and measured.sizes[0] > 0]
    return bool(telling) and all(measured.measure_distance(0, SUM) <= tolerance * SUM * measured.sizes[0] for measured in telling)


def describe_added_state(path: str) -> str:
    return (
        f"The forward pass adds up over the rows in {path!r}. With R replicas the variable changes by the mean of what they add, or by what "
        f'the first one adds, and so by about one R-th of what one replica with all rows adds. Make the variable with aggregation="sum", '
        f"divide by the number of rows, or write replicas=1."
    )
