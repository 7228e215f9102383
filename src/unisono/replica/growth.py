"""How a number that is made of a replica's rows grows with them, found by measuring it on some rows, on others, and on both together.

A sum over both is the sum of the two, and sums of replicas add up to the sum of the batch. A mean over both is their mean, and counts by the
replica's share of the rows. What is neither has a value over replicas that is not that of the whole batch, and is warned of. So is a number
that grows like a mean or a sum where its gradient does not, as the largest of saturated values.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono.replica.coupling import warn_of_coupling

EXACT, HALF, ROUGH = 1e-4, 0.02, 0.4
"""How far a ratio may be from 1 or 2: by rounding, to half precision too, and where replicas draw random numbers."""

APART = 10
"""How much further the rounding of gradients may take them."""

ENOUGH = 32
"""Where replicas draw, so many rows at least are measured, for their numbers to be alike."""
ENOUGH_FOR_GRADIENTS = 256
"""The same for gradients, which cancel one another more than losses do."""


class Growth:
    """The numbers of a step, by what they are, and how each grows."""

    def __init__(self) -> None:
        self.asked_for: set[str] = set()
        self._of_others: set[str] = set()
        self._is_sum: dict[str, bool] = {}
        self._measured: dict[str, Any] | None = None
        self._caught: dict[str, Any] | None = None
        self._said: set[str] = set()

    @contextlib.contextmanager
    def caught(self) -> Iterator[dict[str, Any]]:
        """The losses that are asked for in this block of a trace."""
        self._caught = {}
        try:
            yield self._caught
        finally:
            self._caught = None

    def is_said(self, what: str) -> None:
        """Note that the user knows what replicas make of this number."""
        self._said.add(what)

    def weighted(self, what: str, value: Any, share: Any, of_others: bool = False) -> Any:
        """Return the replica's part of this number of the whole batch, in a trace. `of_others`: it may be made of other numbers."""
        (part,) = self.weighted_all(what, [value], share, of_others)
        return part

    def weighted_all(self, what: str, values: list[Any], share: Any, of_others: bool = False) -> list[Any]:
        """Return the replica's part of arrays that grow together, as the gradients of one loss do."""
        self.asked_for.add(what)
        self._of_others |= {what} if of_others else set()
        measured = self._measured
        if measured is not None:
            flat = jnp.concatenate([jnp.ravel(value).astype(jnp.float32) for value in values])
            jax.debug.callback(lambda numbers: measured.update({what: np.asarray(numbers)}), flat)
        if self._caught is not None:
            self._caught[what] = sum(jnp.sum(value.astype(jnp.float32)) for value in values)
        return values if self._is_sum.get(what) else [value * share for value in values]

    @property
    def undecided(self) -> bool:
        """Whether a number told nothing so far: zero is a sum and a mean."""
        return bool(self.asked_for - self._is_sum.keys())

    def measure(self) -> dict[str, Any]:
        """Begin to measure: the next run puts its numbers into this dict."""
        self._measured = {}
        return self._measured

    def decide(self, parts: tuple[dict[str, Any], dict[str, Any]], both: dict[str, Any], tolerance: float) -> bool:
        """Take sums for sums from now on; return whether there are new ones: what others are made of them is measured again then.

        `parts` are measured on some rows and on as many others, `both` on all of them; `tolerance` is how far a ratio may be from 1 or 2.
        """
        self._measured = None
        one, other = parts
        known = sorted(one.keys() & other.keys() & both.keys() - self._is_sum.keys())
        ratios = {what: ratio((one[what] + other[what]) / 2, both[what]) for what in known}
        ratios = {what: grown for what, grown in ratios.items() if grown is not None}  # zeros tell nothing
        are_sums = {what for what, grown in ratios.items() if abs(grown - 2) < abs(grown - 1)}
        again = bool(are_sums - self._of_others) and bool(self._of_others)
        for what, grown in ratios.items():
            if again and what in self._of_others:
                continue
            self._is_sum[what] = what in are_sums
            if min(abs(grown - 1), abs(grown - 2)) > tolerance and what not in self._said:
                self._said.add(what)
                warnings.warn(neither(what, grown), stacklevel=2)
        return again

    def compare(self, parts: tuple[dict[str, Any], dict[str, Any]], both: dict[str, Any], tolerance: float) -> None:
        """Say which gradients of numbers on all rows are not made of those on parts of them, as the numbers are."""
        one, other = parts
        for what in sorted(one.keys() & other.keys() & both.keys() & self._is_sum.keys() - self._said):
            together = 1.0 if self._is_sum[what] else 0.5
            if distance((one[what], other[what]), together, both[what]) > APART * tolerance:
                self._said.add(what)
                warn_of_coupling(what[:1].upper() + what[1:])


def ratio(once: Any, twice: Any) -> float | None:
    """Return how many times as large numbers are; None where that cannot be said.

    >>> ratio([1.0, 0.0, 3.0], [2.0, 0.0, 6.0]), ratio(0.0, 0.0)
    (2.0, None)
    """
    once, twice = np.asarray(once, "float64").ravel(), np.asarray(twice, "float64").ravel()
    size = once @ once
    return float(once @ twice / size) if np.isfinite(size) and size > 0 and np.all(np.isfinite(twice)) else None


def distance(parts: tuple[Any, Any], together: float, both: Any) -> float:
    """Return how far `together` times the sum of both parts is from what both give, as a share of the parts' size; 0 where that cannot be said.

    >>> distance(([3.0, 0.0], [0.0, 4.0]), 1, [3.0, 4.0]), distance(([3.0], [-3.0]), 0.5, [6.0]), distance(([0.0], [0.0]), 1, [0.0])
    (0.0, 2.0, 0.0)
    """
    one, other, both = (np.asarray(array, "float64").ravel() for array in (*parts, both))
    size = together * (np.linalg.norm(one) + np.linalg.norm(other))
    apart = np.linalg.norm(together * (one + other) - both)
    return float(apart / size) if np.isfinite(size) and size > 0 and np.isfinite(apart) else 0.0


def neither(what: str, grown: float) -> str:
    return (
        f"{what[:1].upper()}{what[1:]} is made of all rows of a replica, and {grown:.4g} times as large for twice as many rows: "
        f"neither a mean over rows (1) nor a sum (2). So what R replicas make of it is not its value on the whole batch; it is weighted as "
        f"if it were the nearer of the two. Give one value for each row, or write replicas=1."
    )
