"""The losses of runs, compared in words: what a plot is too coarse to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from unisono._src.audit.html_numbers import count_nouns, is_drawable


class Curve(NamedTuple):
    """The losses of a run, by step."""

    name: str
    losses: Sequence[float | None]


def has_same_losses(one: Curve, other: Curve) -> bool:
    """Return whether two runs have the same loss at each step."""
    return len(one.losses) == len(other.losses) and all(map(is_same, one.losses, other.losses))


def is_same(one: float | None, other: float | None) -> bool:
    """Return whether two losses are the same. NaN is the same as NaN."""
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def describe_curve(curve: Curve) -> str:
    """Return in words what is to say of the losses of the first run."""
    last = curve.losses[-1]
    return "; ".join(
        ["no loss after the last step" if last is None else f"{last:.9g} after the last step", *describe_gaps(curve)]
    )


def compare_curves(first: Curve, other: Curve) -> str:
    """Return in words how the losses of a run lie beside those of the first run."""
    pairs = list(zip(first.losses, other.losses, strict=False))
    parted = [step for step, pair in enumerate(pairs, 1) if not is_same(*pair)]
    if parted:
        apart = [abs(a - b) for a, b in pairs if a is not None and b is not None and is_drawable(a) and is_drawable(b)]
        largest = f", at most {max(apart):.2g} apart" if any(apart) else ""
        comparison = f"another loss than {first.name} from step {parted[0]} on{largest}"
    elif len(first.losses) == len(other.losses):
        comparison = f"at every step the loss of {first.name}"
    else:
        comparison = f"the losses of {first.name}, with {count_nouns(len(other.losses), 'step')} in place of {len(first.losses)}"
    return "; ".join([comparison, *describe_gaps(other)])


def describe_gaps(curve: Curve) -> list[str]:
    """Return in words where losses are missing or not finite."""
    missing = sum(loss is None for loss in curve.losses)
    unfit = [step for step, loss in enumerate(curve.losses, 1) if loss is not None and not is_drawable(loss)]
    words = [f"no loss is told at {missing} of {len(curve.losses)} steps"] if missing else []
    return [
        *words,
        *([f"NaN or infinite at {count_nouns(len(unfit), 'step')}, the first one is step {unfit[0]}"] if unfit else []),
    ]
