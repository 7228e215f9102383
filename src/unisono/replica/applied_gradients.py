"""Gradients that replica code has made or changed by itself: whether those of replicas add up to those of all their rows.

What `value_and_grad` gives adds up. A norm, a bound or a quotient that the code takes of a replica's gradients does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np

from unisono.replica.growth import APART, EXACT, TELLING, Arrays, Measured, kinds_of

Parts = tuple[Arrays, Arrays, Arrays]
"""What is applied on some rows, on as many others, and on both together."""


def are_apart(measured: Iterable[Parts], tolerance: float = APART * EXACT) -> bool:
    """Return whether gradients on all of some rows are neither the sum nor the mean of those on their halves.

    What does not depend on the rows, as the gradient of a regularizer, may be added: that is as much on other rows.
    """
    kinds: list[int] | None = None
    constant: Arrays = []
    sizes: list[float] = []
    for one, other, both in measured:
        now = Measured.of(one, other, both)
        if not (now.is_telling and now.has_parts):
            continue
        if kinds is None:
            kinds = kinds_of([now])
            sizes = now.sizes
        if kinds is None:
            continue
        halves = [(a.astype("float64") + b) / 2 for a, b in zip(one, other, strict=True)]
        beside = [whole - kind * half for whole, kind, half in zip(both, kinds, halves, strict=True)]
        if not constant:
            constant = beside
            continue
        sizes = list(map(max, sizes, now.sizes))
        least = TELLING * max(sizes)
        for array, before, kind, size in zip(beside, constant, kinds, sizes, strict=True):
            if np.linalg.norm(array - before) > tolerance * kind * max(size, least):
                return True
    return False


def warn_of_gradients(name: str) -> None:
    """Say that the gradients which a function of this name applies are not those of the global batch."""
    warnings.warn(
        f"The function {name!r} applies gradients that it has made or changed by itself, and those of replicas do not add up to those of all their "
        f"rows: a norm, a bound (clipping) or a quotient of one replica's gradients is not that of the whole batch. Give the optimizer what "
        f"un.value_and_grad returns, and let it clip: keras.optimizers.Adam(global_clipnorm=1.0) clips the summed gradient. If each replica is "
        f"meant to change its own, or the batch to be one, write replicas=1.",
        stacklevel=2,
    )
