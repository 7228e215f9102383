"""The growth of a number that is made of a replica's rows, measured on some rows, on others, and on both together.

A sum over both is the sum of the two, and the sums of replicas add up to the sum of the batch. A mean over both is their mean, and counts by
the row fraction of the replica. A number that is neither has a value over replicas that is not its value on the whole batch: the user is
warned of it. The user is also warned of a number that grows like a mean or a sum while its gradient does not, as the largest of saturated
values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from unisono._src.replica.mismatches import Mismatches
from unisono._src.replica.row_coupling import describe_coupling
from unisono._src.typing import Array

EXACT = 1e-4
"""How far a ratio may be from 1 or 2 by rounding."""
HALF = 0.02
"""How far by rounding to half precision."""
ROUGH = 0.4
"""How far where random numbers cannot be held still."""

GRADIENT_SLACK = 10
"""How many times further gradients may be away than numbers: they round more."""

ENOUGH_ROWS = 32
"""The fewest rows to measure where random numbers cannot be held still, so that the numbers of two runs are alike."""
ENOUGH_ROWS_FOR_GRADIENTS = 256
"""The same for gradients, which cancel one another more than losses do."""

SMALLEST_TELLING = 1e-3
"""An array that is smaller than this, relative to the arrays that grow with it, is rounding."""

MEAN = 1
"""How many times as large a mean is for twice as many rows."""
SUM = 2
"""How many times as large a sum is for twice as many rows."""

Arrays = list[np.ndarray]
"""One number, or arrays that are made together, as the gradients of one loss."""

ODD = 0.01
"""A ratio that is nearer to 1 or 2 tells a reader nothing."""

APPLIED_GRADIENTS = "what train_step applies as gradients"
"""The name of the applied gradients among a step's numbers."""


class Measurement(NamedTuple):
    """Arrays on some rows, on as many others, and on both together, reduced to a few figures for each array."""

    sizes: list[float]
    """The mean of their norms on the two parts."""
    halves: list[float]
    """The squared norm of the mean of both parts."""
    cross: list[float]
    """The product of this mean with the array on all rows."""
    wholes: list[float]
    """The squared norm of the array on all rows."""
    is_telling: bool
    """Whether all values on all rows are finite. If they are not, the values on the parts mean nothing."""
    has_parts: bool
    """Whether all values on both parts are finite."""

    @classmethod
    def of(cls, one: Arrays, other: Arrays, both: Arrays) -> Measurement:
        """Return the figures of these arrays."""
        sizes: list[float] = []
        halves: list[float] = []
        cross: list[float] = []
        wholes: list[float] = []
        for first, second, whole in zip(one, other, both, strict=True):
            half = (first.ravel().astype("float64") + second.ravel()) / 2
            flat = whole.ravel().astype("float64")
            sizes.append(float(np.linalg.norm(first) + np.linalg.norm(second)) / 2)
            halves.append(float(half @ half))
            cross.append(float(half @ flat))
            wholes.append(float(flat @ flat))
        return cls(sizes, halves, cross, wholes, are_all_finite(both), are_all_finite([*one, *other]))

    def measure_distance(self, index: int, kind: int) -> float:
        """Return how far an array on all rows is from `kind` times the mean of both parts."""
        squared = self.wholes[index] - 2 * kind * self.cross[index] + kind**2 * self.halves[index]
        return max(0.0, squared) ** 0.5


Evidence = Mapping[str, Sequence[Measurement]]
"""The measurements of each number, by its name."""


class Growth:
    """The numbers of a step by their names, and how each of them grows."""

    def __init__(self) -> None:
        self.number_names: set[str] = set()
        self.decision_count = 0
        """How many decisions changed what a trace does with numbers. An older trace still does what was known then."""
        self._of_others: set[str] = set()
        """The numbers that may be made of other numbers."""
        self._kinds: dict[str, list[int]] = {}
        """For each array of a number, MEAN or SUM."""
        self._sizes: dict[str, list[float]] = {}
        """The largest sizes that were measured."""
        self._listener: Callable[[str, list[Array]], object] | None = None
        self._warned: set[str] = set()
        self.mismatches = Mismatches()
        """The numbers that are neither means nor sums, until they are told."""

    @contextlib.contextmanager
    def listen(self, listener: Callable[[str, list[Array]], object]) -> Generator[None]:
        """Call `listener(what, arrays)` for each number that is weighed in this block of a trace."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    @contextlib.contextmanager
    def collect_losses(self) -> Generator[dict[str, Array]]:
        """Collect the losses that are weighed in this block of a trace."""
        losses: dict[str, Array] = {}

        def note(what: str, arrays: list[Array]) -> None:
            losses[what] = cast(Array, sum(map(jnp.sum, arrays)))

        with self.listen(note):
            yield losses

    def note_warned(self, what: str) -> None:
        """Note that the user was already warned of this number."""
        self._warned.add(what)

    def weighted(self, what: str, value: Array, row_fraction: Array, of_others: bool = False) -> Array:
        """Return the replica's contribution to this number of the whole batch, in a trace. `of_others`: it may be made of other numbers."""
        if of_others:
            self._of_others.add(what)
        return self.weigh_arrays(what, [value], row_fraction)[0]

    def weigh_arrays(self, what: str, values: list[Array], row_fraction: Array) -> list[Array]:
        """Return the replica's contribution to arrays that are made together, as the gradients of one loss are."""
        self.number_names.add(what)
        if self._listener is not None:
            self._listener(what, [value.astype(jnp.float32) for value in values])
        kinds = self._kinds.get(what) or [MEAN] * len(values)
        return [value if kind == SUM else value * row_fraction for kind, value in zip(kinds, values, strict=True)]

    @property
    def undecided_numbers(self) -> set[str]:
        """Return the numbers whose kind is still open. Zero, for instance, is a sum and a mean."""
        return self.number_names - self._kinds.keys()

    @property
    def trace_version(self) -> int:
        """Return a number that stays the same as long as a trace measures the same. Where numbers are made of others, a decision on the others
        changes it."""
        return self.decision_count if self._of_others else 0

    def decide_kinds(self, evidence: Evidence, tolerance: float) -> bool:
        """Decide how numbers grow from now on. Return whether numbers that are made of others must be measured again, since the others turn
        out to be sums.

        `tolerance` is how far a ratio may be from 1 or 2.
        """
        telling = {what: [measured for measured in seen if measured.is_telling] for what, seen in evidence.items()}
        new_kinds = {what: kinds for what, seen in telling.items() if what not in self._kinds and (kinds := choose_kinds(seen))}
        sums = {what for what, kinds in new_kinds.items() if SUM in kinds}
        waiting = self._of_others if sums - self._of_others else set[str]()
        self._kinds |= {what: kinds for what, kinds in new_kinds.items() if what not in waiting}
        self.decision_count += bool(sums - waiting)
        for what, seen in telling.items():
            if what in self._kinds and what not in waiting:
                self._warn_of_mismatch(what, seen, GRADIENT_SLACK * tolerance if what == APPLIED_GRADIENTS else tolerance)
        return bool(waiting)

    def _warn_of_mismatch(self, what: str, seen: Sequence[Measurement], tolerance: float) -> None:
        """Note a number that is neither a mean nor a sum on some of the rows that were measured."""
        known = self._sizes.get(what)
        sizes = find_largest_sizes([measured.sizes for measured in seen if measured.has_parts] + ([known] if known else []))
        self._sizes[what] = sizes
        if what in self._warned:
            return
        growths = (find_odd_growth(measured, self._kinds[what], sizes, tolerance) for measured in seen)
        factor = next((growth for growth in growths if growth is not None), None)
        if factor is not None:
            self._warned.add(what)
            self.mismatches.note(what, describe_mismatch(what, factor))

    def compare_gradients(self, slopes: Evidence, tolerance: float) -> None:
        """Note numbers whose gradient on all rows does not follow from the gradients on parts of them, as the number itself does."""
        for what in sorted(slopes.keys() & self._kinds.keys() - self._warned):
            seen = [measured for measured in slopes[what] if measured.is_telling and measured.has_parts]
            sizes = find_largest_sizes([measured.sizes for measured in seen])
            kinds = [self._kinds[what][0]] * len(sizes)
            if any(find_odd_growth(measured, kinds, sizes, GRADIENT_SLACK * tolerance) is not None for measured in seen):
                self._warned.add(what)
                self.mismatches.note(what, describe_coupling(what[:1].upper() + what[1:]))


def choose_kinds(seen: Sequence[Measurement]) -> list[int] | None:
    """Return MEAN or SUM for each array, whichever is nearer; None where all are zero. An array that tells nothing gets the kind of most of
    them."""
    halves = sum_columns(measured.halves for measured in seen if measured.has_parts)
    cross = sum_columns(measured.cross for measured in seen if measured.has_parts)
    if not sum(halves):
        return None
    least = SMALLEST_TELLING**2 * sum(halves)
    overall = sum(cross) / sum(halves)
    factors = [product / half if half > least else overall for product, half in zip(cross, halves, strict=True)]
    return [SUM if abs(factor - SUM) < abs(factor - MEAN) else MEAN for factor in factors]


def sum_columns(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def find_largest_sizes(sizes: Sequence[Sequence[float]]) -> list[float]:
    return [max(column) for column in zip(*sizes, strict=True)]


def are_all_finite(arrays: Arrays) -> bool:
    return all(bool(np.all(np.isfinite(array))) for array in arrays)


def find_odd_growth(measured: Measurement, kinds: Sequence[int], sizes: Sequence[float], tolerance: float) -> float | None:
    """Return how many times as large an array is on all rows, for the first array that fits neither a mean nor a sum; None if all fit.

    `sizes` are the largest of each array. A difference that is small compared with them is the rounding of terms that cancel.
    """
    if not measured.has_parts:
        return float("nan")
    least = SMALLEST_TELLING * max(sizes, default=0)
    for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if measured.measure_distance(index, kind) > tolerance * kind * max(size, least):
            half = measured.halves[index]
            return measured.cross[index] / half if half else float("inf")
    return None


def compute_growth_ratio(once: ArrayLike, twice: ArrayLike) -> float | None:
    """Return how many times as large numbers are; None where that cannot be said.

    >>> compute_growth_ratio([1.0, 0.0, 3.0], [2.0, 0.0, 6.0]), compute_growth_ratio(0.0, 0.0)
    (2.0, None)
    """
    once = np.asarray(once, "float64").ravel()
    twice = np.asarray(twice, "float64").ravel()
    size = once @ once
    return float(once @ twice / size) if np.isfinite(size) and size > 0 and np.all(np.isfinite(twice)) else None


def describe_mismatch(what: str, factor: float) -> str:
    if not np.isfinite(factor):
        how = "it has no value on some rows, and has one on more of them"
    elif min(abs(factor - MEAN), abs(factor - SUM)) < ODD:
        how = "on all of some rows it is neither the mean (1) nor the sum (2) of what it is on their halves"
    else:
        how = f"it is {factor:.4g} times as large for twice as many rows, neither a mean over rows (1) nor a sum (2)"
    return (
        f"{what[:1].upper()}{what[1:]} is made of all rows of a replica, and {how}. So what R replicas make of it is not its value on the whole "
        f"batch; it is weighted as if it were the nearer of the two. Give one value for each row, or write replicas=1."
    )
