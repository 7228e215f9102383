"""State of the user's own layers that is no mean over rows. Replicas average what they change: of a sum they keep a part."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import keras

from unisono._src.replica.growth import MEAN, SUM, Measurement
from unisono._src.replica.mismatches import Mismatches

CLEARLY = 0.1
"""The distance from a mean and from a sum, relative to the size, that rounding does not explain: changes are differences."""


class AddedState:
    """The variables of which the user was warned."""

    def __init__(self, mismatches: Mismatches) -> None:
        self._mismatches = mismatches
        self._warned: set[str] = set()
        self._no_sums: set[str] = set()
        """The variables of which some rows have shown that they are no sums. A maximum that moves seldom looks like one later."""

    def check(self, variable: keras.Variable, seen: Sequence[Measurement], tolerance: float) -> None:
        """Note once a variable whose change by rows is the sum of the changes by their parts, or neither this nor their mean.

        Replicas that leave different integers are refused by the step.
        """
        path = variable.path
        telling = [measured for measured in seen if measured.is_telling and measured.has_parts and measured.sizes[0] > 0]
        if path in self._warned or not telling:
            return
        if not all(is_near(measured, SUM, tolerance) for measured in telling):
            self._no_sums.add(path)
        is_sum = path not in self._no_sums
        is_odd = any(not any(is_near(measured, kind, max(CLEARLY, tolerance)) for kind in (MEAN, SUM)) for measured in telling)
        if is_sum or (is_odd and jnp.issubdtype(variable.dtype, jnp.floating)):
            self._warned.add(path)
            text = describe_added_state(path) if is_sum else describe_odd_state(path)
            self._mismatches.note(f"the variable {path!r}", text, layer=path.rpartition("/")[0])


def is_near(measured: Measurement, kind: int, tolerance: float) -> bool:
    """Return whether an array on all rows is `kind` times the mean of what it is on parts of them."""
    return measured.measure_distance(0, kind) <= tolerance * kind * measured.sizes[0]


def describe_added_state(path: str) -> str:
    return (
        f"The forward pass adds up over the rows in {path!r}. With R replicas the variable changes by the mean of what they add, or by what "
        f'the first one adds, and so by about one R-th of what one replica with all rows adds. Make the variable with aggregation="sum", if '
        f"the forward pass does nothing but add to it, divide by the number of rows, or write replicas=1."
    )


def describe_odd_state(path: str) -> str:
    return (
        f"What the forward pass makes of all rows in {path!r} is neither the mean nor the sum of what it makes of parts of them, as a maximum, or "
        f"a sum that decays. With R replicas the variable changes by the mean of their changes: another value than with one replica. Make it "
        f"of means over rows, or write replicas=1."
    )
