"""Gradients that replica code has made or changed by itself: whether those of replicas add up to those of all their rows.

What `value_and_grad` gives adds up. A norm, a bound or a quotient that the code takes of a replica's gradients does not; a mean over a replica's
rows, and what does not depend on them, do where the code divides them by the number of replicas.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Collection, Iterable

import numpy as np

from unisono._src.replica.growth import APART, EXACT, MEAN, TELLING, Arrays, Measured, kinds_of

Parts = tuple[Arrays, Arrays, Arrays]
"""What is applied on some rows, on as many others, and on both together."""


class Fault(enum.Enum):
    """Why gradients of replicas do not add up to those of all rows."""

    APART = (
        "those of replicas do not add up to those of all their rows: a norm, a bound (clipping) or a quotient of one replica's gradients is not "
        "that of the whole batch. Let the optimizer clip: keras.optimizers.Adam(global_clipnorm=1.0) clips the summed gradient"
    )
    MEANS = (
        "they stay the same where a replica's rows are taken twice, as those of a mean over them do: strategy.run adds up what {replicas} replicas "
        "apply, {replicas} times the mean over the global batch"
    )
    CONSTANT = (
        "a part of them does not depend on the rows, as a weight decay: it is added in each of {replicas} replicas, and counts {replicas} times. "
        "Let the optimizer do it: keras.optimizers.AdamW(weight_decay=...), or divide it by strategy.num_replicas_in_sync"
    )


def fault_of(
    measured: Iterable[Parts], replicas: int, factors: Collection[float], tolerance: float = APART * EXACT
) -> Fault | None:
    """Return why gradients do not add up, as far as that shows.

    `factors` are the numbers by which the code multiplies or divides: the number of replicas among them is taken for a division by it.
    """
    seen = [(parts, now) for parts in measured if (now := Measured.of(*parts)).is_telling and now.has_parts]
    kinds = kinds_of([seen[0][1]]) if seen else None
    if kinds is None:
        return None
    sizes = [max(column) for column in zip(*(now.sizes for _, now in seen), strict=True)]
    least = [tolerance * kind * max(size, TELLING * max(sizes)) for kind, size in zip(kinds, sizes, strict=True)]
    beside = [beside_the_rows(parts, kinds) for parts, _ in seen]
    for other in beside[1:]:
        if any(np.linalg.norm(a - b) > most for a, b, most in zip(other, beside[0], least, strict=True)):
            return Fault.APART
    if any(math.isclose(factor, number, rel_tol=1e-4) for factor in factors for number in (replicas, 1 / replicas)):
        return None
    if MEAN in kinds:
        return Fault.MEANS
    return Fault.CONSTANT if any(np.linalg.norm(a) > most for a, most in zip(beside[0], least, strict=True)) else None


def beside_the_rows(parts: Parts, kinds: list[int]) -> Arrays:
    """Return what gradients are on all rows beside the sum or the mean of the parts: the same on all rows, if it does not depend on them."""
    one, other, both = parts
    halves = [(a.astype("float64") + b) / 2 for a, b in zip(one, other, strict=True)]
    return [whole - kind * half for whole, kind, half in zip(both, kinds, halves, strict=True)]


def warn_of_gradients(name: str, fault: Fault, replicas: int) -> None:
    """Say why the gradients which a function of this name applies are not those of the global batch."""
    warnings.warn(
        f"The function {name!r} applies gradients that it has made or changed by itself, and {fault.value.format(replicas=replicas)}. "
        f"Give the optimizer what un.value_and_grad returns. If each replica is meant to change its own, or the batch to be one, write "
        f"replicas=1.",
        stacklevel=2,
    )
