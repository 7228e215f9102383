"""Gradients that user code has made or changed by itself. Do the replicas' gradients add up to the gradients of all rows?

The gradients of `value_and_grad` add up. A norm, a bound or a quotient that the code takes of a replica's gradients does not. A mean over a
replica's rows, and terms that do not depend on rows, add up where the code divides them by the number of replicas.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Collection, Iterable

import numpy as np

from unisono._src.replica.growth import MEAN, SMALLEST_TELLING, Arrays, Measurement, choose_kinds, find_largest_sizes

Parts = tuple[Arrays, Arrays, Arrays]
"""The gradients that are applied on some rows, on as many others, and on both together."""


class GradientFault(enum.Enum):
    """Reasons why gradients of replicas do not add up to the gradients of all rows."""

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


def find_gradient_fault(
    measured: Iterable[Parts], replicas: int, factors: Collection[float], tolerance: float
) -> GradientFault | None:
    """Return why gradients do not add up; None where no reason shows.

    `factors` are the numbers by which the code multiplies or divides. If the number of replicas is among them, the code is taken to divide by it.
    """
    seen = [(parts, figures) for parts in measured if (figures := Measurement.of(*parts)).is_telling and figures.has_parts]
    kinds = choose_kinds([seen[0][1]]) if seen else None
    if kinds is None:
        return None
    sizes = find_largest_sizes([figures.sizes for _, figures in seen])
    least = [tolerance * kind * max(size, SMALLEST_TELLING * max(sizes)) for kind, size in zip(kinds, sizes, strict=True)]
    remainders = [subtract_parts(parts, kinds) for parts, _ in seen]
    for other in remainders[1:]:
        if any(np.linalg.norm(array - first) > most for array, first, most in zip(other, remainders[0], least, strict=True)):
            return GradientFault.APART
    if any(math.isclose(factor, number, rel_tol=1e-4) for factor in factors for number in (replicas, 1 / replicas)):
        return None
    if MEAN in kinds:
        return GradientFault.MEANS
    has_constant = any(np.linalg.norm(array) > most for array, most in zip(remainders[0], least, strict=True))
    return GradientFault.CONSTANT if has_constant else None


def subtract_parts(parts: Parts, kinds: list[int]) -> Arrays:
    """Return the gradients on all rows less the sum or the mean of the parts. Of terms that do not depend on rows it is always the same."""
    one, other, both = parts
    halves = [(first.astype("float64") + second) / 2 for first, second in zip(one, other, strict=True)]
    return [whole - kind * half for whole, kind, half in zip(both, kinds, halves, strict=True)]


def warn_of_gradients(name: str, fault: GradientFault, replicas: int) -> None:
    """Warn that the gradients which the function of this name applies are not the gradients of the global batch, and say why."""
    warnings.warn(
        f"The function {name!r} applies gradients that it has made or changed by itself, and {fault.value.format(replicas=replicas)}. "
        f"Give the optimizer what un.value_and_grad returns. If each replica is meant to change its own, or the batch to be one, write "
        f"replicas=1.",
        stacklevel=2,
    )
