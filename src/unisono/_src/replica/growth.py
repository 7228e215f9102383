"""How a number that is made of a replica's rows grows with them, found by measuring it on some rows, on others, and on both together.

A sum over both is the sum of the two, and sums of replicas add up to the sum of the batch. A mean over both is their mean, and counts by the
replica's share of the rows. What is neither has a value over replicas that is not that of the whole batch, and is warned of. So is a number
that grows like a mean or a sum where its gradient does not, as the largest of saturated values.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.replica.row_coupling import warn_of_coupling

EXACT, HALF, ROUGH = 1e-4, 0.02, 0.4
"""How far a ratio may be from 1 or 2: by rounding, to half precision too, and where random numbers cannot be held still."""

APART = 10
"""How much further the rounding of gradients may take them."""

ENOUGH = 32
"""Where random numbers cannot be held still, so many rows at least are measured, for their numbers to be alike."""
ENOUGH_FOR_GRADIENTS = 256
"""The same for gradients, which cancel one another more than losses do."""

TELLING = 1e-3
"""An array that is smaller, beside those that grow with it, is rounding."""

MEAN, SUM = 1, 2
"""How many times as large they are for twice as many rows."""

Arrays = list[np.ndarray]
"""One number, or arrays that are made together, as the gradients of one loss."""

ODD = 0.01
"""A ratio that is nearer to 1 or 2 says nothing to who reads it."""

APPLIED = "what train_step applies as gradients"
"""The name of these among a step's numbers."""


class Measured(NamedTuple):
    """Arrays on some rows, on as many others, and on both together: what there is to know of them, one figure for each array."""

    sizes: list[float]
    """The mean of their norms on the two parts."""
    halves: list[float]
    """The squared norm of the mean of both parts."""
    cross: list[float]
    """Its product with what they are on all rows."""
    wholes: list[float]
    """The squared norm of that."""
    is_telling: bool
    """Whether they have values on all rows; else those on the parts mean nothing."""
    has_parts: bool
    """Whether they have values on both parts."""

    @classmethod
    def of(cls, one: Arrays, other: Arrays, both: Arrays) -> Measured:
        """Return what is to be known of these arrays."""
        sizes, halves, cross, wholes = [], [], [], []
        for a, b, whole in zip(one, other, both, strict=True):
            half, all_ = (a.ravel().astype("float64") + b.ravel()) / 2, whole.ravel().astype("float64")
            sizes.append(float(np.linalg.norm(a) + np.linalg.norm(b)) / 2)
            halves.append(float(half @ half))
            cross.append(float(half @ all_))
            wholes.append(float(all_ @ all_))
        return cls(sizes, halves, cross, wholes, all_finite(both), all_finite([*one, *other]))

    def distance(self, index: int, kind: int) -> float:
        """Return how far an array on all rows is from `kind` times the mean of both parts."""
        squared = self.wholes[index] - 2 * kind * self.cross[index] + kind**2 * self.halves[index]
        return max(0.0, squared) ** 0.5


Evidence = Mapping[str, Sequence[Measured]]
"""By what was measured."""


class Growth:
    """The numbers of a step, by what they are, and how each grows."""

    def __init__(self) -> None:
        self.asked_for: set[str] = set()
        self.decisions = 0
        """How often it was decided what numbers are; a trace of before does with them what was known then."""
        self._of_others: set[str] = set()
        self._kinds: dict[str, list[int]] = {}
        """For each array of a number, MEAN or SUM."""
        self._sizes: dict[str, list[float]] = {}
        """The largest that were measured."""
        self._measured: dict[str, Arrays] | None = None
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

    @contextlib.contextmanager
    def measuring(self, numbers: dict[str, Arrays]) -> Iterator[None]:
        """Let what is traced in this block put its numbers into this dict when it runs."""
        self._measured = numbers
        try:
            yield
        finally:
            self._measured = None

    def is_said(self, what: str) -> None:
        """Note that the user knows what replicas make of this number."""
        self._said.add(what)

    def weighted(self, what: str, value: Any, share: Any, of_others: bool = False) -> Any:
        """Return the replica's part of this number of the whole batch, in a trace. `of_others`: it may be made of other numbers."""
        (part,) = self.weighted_all(what, [value], share, of_others)
        return part

    def weighted_all(self, what: str, values: list[Any], share: Any, of_others: bool = False) -> list[Any]:
        """Return the replica's part of arrays that are made together, as the gradients of one loss are."""
        self.asked_for.add(what)
        self._of_others |= {what} if of_others else set()
        measured = self._measured
        if measured is not None:

            def note(*arrays: Any) -> None:
                measured[what] = [np.asarray(array) for array in arrays]

            jax.debug.callback(note, *(value.astype(jnp.float32) for value in values))
        if self._caught is not None:
            self._caught[what] = sum(jnp.sum(value.astype(jnp.float32)) for value in values)
        kinds = self._kinds.get(what) or [MEAN] * len(values)
        return [value if kind == SUM else value * share for kind, value in zip(kinds, values, strict=True)]

    @property
    def undecided(self) -> set[str]:
        """Return the numbers that told nothing so far: zero is a sum and a mean."""
        return self.asked_for - self._kinds.keys()

    @property
    def known_in_trace(self) -> int:
        """Equal as long as what is measured is made in the same way: where numbers are made of others, until it is decided what these are."""
        return self.decisions if self._of_others else 0

    def decide(self, evidence: Evidence, tolerance: float) -> bool:
        """Decide what numbers are from now on; return whether those that are made of others are to be measured again, since the others turn out
        to be sums.

        `tolerance` is how far a ratio may be from 1 or 2.
        """
        telling = {what: [m for m in seen if m.is_telling] for what, seen in evidence.items()}
        found = {what: kinds for what, seen in telling.items() if what not in self._kinds and (kinds := kinds_of(seen))}
        sums = {what for what, kinds in found.items() if SUM in kinds}
        again = bool(sums - self._of_others) and bool(self._of_others)
        decided = {what: kinds for what, kinds in found.items() if not (again and what in self._of_others)}
        self._kinds |= decided
        self.decisions += any(SUM in kinds for kinds in decided.values())
        for what, seen in telling.items():
            if what in self._kinds and not (again and what in self._of_others):
                self._judge(what, seen, APART * tolerance if what == APPLIED else tolerance)
        return again

    def _judge(self, what: str, seen: Sequence[Measured], tolerance: float) -> None:
        """Say of a number that is neither a mean nor a sum on some of the rows that were measured."""
        kinds, sizes = self._kinds[what], largest([m.sizes for m in seen if m.has_parts], self._sizes.get(what))
        self._sizes[what] = sizes
        if what in self._said:
            return
        grown = next((by for m in seen if (by := apart_by(m, kinds, sizes, tolerance)) is not None), None)
        if grown is not None:
            self._said.add(what)
            warnings.warn(neither(what, grown), stacklevel=2)

    def compare(self, slopes: Evidence, tolerance: float) -> None:
        """Say which gradients of numbers on all rows are not made of those on parts of them, as the numbers are."""
        for what in sorted(slopes.keys() & self._kinds.keys() - self._said):
            seen = [m for m in slopes[what] if m.is_telling and m.has_parts]
            sizes = largest([m.sizes for m in seen], None)
            kinds = [self._kinds[what][0]] * len(sizes)
            if any(apart_by(m, kinds, sizes, APART * tolerance) is not None for m in seen):
                self._said.add(what)
                warn_of_coupling(what[:1].upper() + what[1:])


def kinds_of(seen: Sequence[Measured]) -> list[int] | None:
    """Return MEAN or SUM for each array, whichever is nearer; None where all are zero. An array that tells nothing is what most of them are."""
    halves = summed(m.halves for m in seen if m.has_parts)
    cross = summed(m.cross for m in seen if m.has_parts)
    if not sum(halves):
        return None
    least = TELLING**2 * sum(halves)
    of_all = sum(cross) / sum(halves)
    return [nearest(over / half if half > least else of_all) for over, half in zip(cross, halves, strict=True)]


def summed(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def all_finite(arrays: Arrays) -> bool:
    return all(bool(np.all(np.isfinite(array))) for array in arrays)


def nearest(grown: float) -> int:
    return SUM if abs(grown - SUM) < abs(grown - MEAN) else MEAN


def largest(sizes: Sequence[Sequence[float]], known: Sequence[float] | None) -> list[float]:
    """Return the largest size of each array."""
    return [max(column) for column in zip(*sizes, *([known] if known else []), strict=True)]


def apart_by(measured: Measured, kinds: Sequence[int], sizes: Sequence[float], tolerance: float) -> float | None:
    """Return how many times as large an array is on all rows, if it is neither what a mean is there nor a sum; else None.

    `sizes` are the largest of each array: what is small beside them is the rounding of what cancels.
    """
    if not measured.has_parts:
        return float("nan")
    least = TELLING * max(sizes, default=0)
    for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if measured.distance(index, kind) > tolerance * kind * max(size, least):
            half = measured.halves[index]
            return measured.cross[index] / half if half else float("inf")
    return None


def ratio(once: Any, twice: Any) -> float | None:
    """Return how many times as large numbers are; None where that cannot be said.

    >>> ratio([1.0, 0.0, 3.0], [2.0, 0.0, 6.0]), ratio(0.0, 0.0)
    (2.0, None)
    """
    once, twice = np.asarray(once, "float64").ravel(), np.asarray(twice, "float64").ravel()
    size = once @ once
    return float(once @ twice / size) if np.isfinite(size) and size > 0 and np.all(np.isfinite(twice)) else None


def neither(what: str, grown: float) -> str:
    if not np.isfinite(grown):
        how = "it has no value on some rows, and has one on more of them"
    elif min(abs(grown - MEAN), abs(grown - SUM)) < ODD:
        how = "on all of some rows it is neither the mean (1) nor the sum (2) of what it is on their halves"
    else:
        how = f"it is {grown:.4g} times as large for twice as many rows, neither a mean over rows (1) nor a sum (2)"
    return (
        f"{what[:1].upper()}{what[1:]} is made of all rows of a replica, and {how}. So what R replicas make of it is not its value on the whole "
        f"batch; it is weighted as if it were the nearer of the two. Give one value for each row, or write replicas=1."
    )
