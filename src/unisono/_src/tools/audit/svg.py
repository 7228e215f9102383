"""The drawings of the HTML report, as numbers.

Its template puts them into SVG: the axis and the curves of losses, and strips of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SIZE = 1000
"""Of a plot's own coordinates, which are stretched to the size that the page gives."""

LARGEST = 1e300
"""Numbers beyond it are not drawn: differences of two of them may overflow."""

LEAST_ROOM = 1e-300
"""What is nearer to 0 is 0 on an axis: ticks between such numbers may not be numbers of their own."""

MOST_TICKS = 5
MOST_COLUMNS = 240
MOST_LABELS = 8


class Axis(NamedTuple):
    """An axis, from its lower to its upper end."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def locate(self, number: float) -> float:
        """Compute the height of a number in a drawing. It is 0 at the upper end of the axis and 1 at the lower."""
        return (self.high - number) / (self.high - self.low)

    @property
    def labels(self) -> list[tuple[float, str]]:
        """The ticks with their texts. The texts have as many digits as tell the ticks apart."""
        largest = max(map(abs, self.ticks)) or 1.0
        apart = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else largest
        digits = 1 + math.ceil(max(0.0, math.log10(largest / apart)) + 1e-9)
        return [(self.locate(tick), f"{tick:.{digits}g}") for tick in self.ticks]


def is_drawable(number: float | None) -> bool:
    """Whether a number has a position on an axis."""
    return number is not None and math.isfinite(number) and abs(number) < LARGEST


def make_axis(numbers: Sequence[float | None]) -> Axis:
    """Make an axis for the drawable numbers, with some room around."""
    drawable = [number for number in numbers if number is not None and is_drawable(number)] or [0.0, 1.0]
    low, high = min(drawable), max(drawable)
    # Numbers that differ in their last digits alone have room for ticks that are numbers of their own.
    room = max(0.06 * (high - low), 1e-9 * max(abs(low), abs(high))) if low < high else 0.1 * abs(high)
    room = room if room > LEAST_ROOM else 1.0
    return Axis(low - room, high + room, choose_ticks(low - room, high + room))


def choose_ticks(low: float, high: float) -> tuple[float, ...]:
    """Choose some round numbers between two numbers."""
    rough = (high - low) / MOST_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * size for factor in (1.0, 2.0, 5.0) if factor * size >= rough), 10 * size)
    return tuple(index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1))


def draw_curve(losses: Sequence[float | None], axis: Axis, steps: int) -> str:
    """Draw the path of a curve. A loss between two gaps is a dot, which round ends make of a line without a length."""
    commands: list[str] = []
    is_open = False
    for step, loss in enumerate(losses, 1):
        if loss is None or not is_drawable(loss):
            is_open = False
            continue
        point = f"{SIZE * locate_step(step, steps):.4g} {SIZE * axis.locate(loss):.4g}"
        commands.append(f"L{point}" if is_open else f"M{point}h0")
        is_open = True
    return "".join(commands)


def locate_step(step: int, steps: int) -> float:
    """Compute the position of a step's middle along the axis. The left end is 0, the right end is 1."""
    return (step - 0.5) / steps


def label_steps(steps: Sequence[int]) -> list[tuple[float, int]]:
    """List (position, number) of the steps named below a plot. These are the first one, and others at the same distance."""
    distance = max(1, math.ceil(len(steps) / MOST_LABELS))
    return [(locate_step(at + 1, len(steps)), steps[at]) for at in range(0, len(steps), distance)]


def draw_strip(fractions: Sequence[float]) -> list[tuple[float, float, float]]:
    """List (left end, width, opacity) of a layer's cells that differ. Positions are between 0 and 1. Many steps share a cell."""
    length = max(1, math.ceil(len(fractions) / MOST_COLUMNS))
    cells = [max(fractions[start : start + length]) for start in range(0, len(fractions), length)]
    width = length / len(fractions) if fractions else 1.0
    return [(at * width, width, 0.25 + 0.75 * fraction) for at, fraction in enumerate(cells) if fraction > 0]
