"""Numbers of the HTML report: in words, and on the axes of plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

NOTHING = "\N{EN DASH}"
"""In place of a number that is not known."""

LARGEST = 1e300
"""Numbers beyond it are not drawn: differences of two of them may overflow."""

LOGARITHMIC_FROM = 1000.0
"""An axis is logarithmic where its largest number is this much larger than its smallest one."""

LEAST_ROOM = 1e-300
"""What is nearer to 0 is 0 on an axis: ticks between such numbers may not be numbers of their own."""


class Axis(NamedTuple):
    """An axis, from its lower to its upper end."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_logarithmic: bool = False

    def place(self, number: float) -> float:
        """Return where a number lies: 0 at the lower end, 1 at the upper."""
        low, high, number = (math.log10(x) if self.is_logarithmic else x for x in (self.low, self.high, number))
        return (number - low) / (high - low)

    def write_ticks(self) -> list[str]:
        """Return the texts of the ticks, with as many digits as tell them apart."""
        if self.is_logarithmic:
            return [f"{tick:.0e}".replace("e-0", "e-").replace("e+0", "e") for tick in self.ticks]
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        is_long = decimals > 7 or max(map(abs, self.ticks)) >= 1e6
        return [f"{tick:.3g}" if is_long else f"{tick:.{decimals}f}" for tick in self.ticks]


def is_drawable(number: float | None) -> bool:
    """Return whether a number has a place on an axis."""
    return number is not None and math.isfinite(number) and abs(number) < LARGEST


def make_axis(numbers: Sequence[float]) -> Axis:
    """Return an axis for drawable numbers, with some room around them."""
    low = min(numbers, default=0.0)
    high = max(numbers, default=1.0)
    if low > 0 and high / low > LOGARITHMIC_FROM:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = tuple(10.0**exponent for exponent in exponents[:: max(1, round(len(exponents) / 5))])
        return Axis(low / 1.3, high * 1.3, tuple(tick for tick in ticks if low / 1.3 <= tick <= high * 1.3), is_logarithmic=True)
    # Numbers that differ in their last digits alone have room for ticks that are numbers of their own.
    room = max(0.06 * (high - low), 1e-9 * max(abs(low), abs(high))) if low < high else 0.1 * abs(high)
    room = room if room > LEAST_ROOM else 1.0
    return Axis(low - room, high + room, choose_ticks(low - room, high + room, 5))


def choose_ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Return round numbers between two numbers, at most `most` and one of them."""
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * size for factor in (1.0, 2.0, 5.0) if factor * size >= rough), 10 * size)
    first = math.ceil(low / step)
    return tuple(index * step for index in range(first, math.floor(high / step) + 1))


def choose_steps(steps: Sequence[int]) -> list[int]:
    """Return the indices of the steps that an axis names: the first one, the last one, and round numbers between them."""
    last = len(steps) - 1
    if last < 1:
        return [0] * len(steps)
    round_steps = {round(tick) for tick in choose_ticks(steps[0], steps[-1], 5)}
    apart = max(1, len(steps) // 12)
    return [0, *(at for at, step in enumerate(steps) if step in round_steps and apart <= at <= last - apart), last]


def count_nouns(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def write_seconds(seconds: float) -> str:
    """Return a time as it is said: "8.4 s", "3 min 12 s"."""
    if not math.isfinite(seconds):
        return NOTHING
    return f"{seconds:.1f} s" if seconds < 99.95 else f"{int(seconds) // 60} min {int(seconds) % 60} s"
