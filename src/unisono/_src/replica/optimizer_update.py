"""The end of a step: the optimizer and the metrics, once, from the total of all replicas."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from unisono._src.typing import Array


def apply_gradients(
    optimizer: keras.optimizers.Optimizer, slots: list[Array], gradients: Sequence[Array | None], weights: list[Array]
) -> tuple[list[Array], list[Array]]:
    """Return (weights, the optimizer's state) after one update. Gradients may be missing."""
    cast_gradients = [
        None if gradient is None else gradient.astype(weight.dtype) for gradient, weight in zip(gradients, weights, strict=True)
    ]
    return optimizer.stateless_apply(slots, cast_gradients, weights)


def add_to_metrics(before: list[Array], change: list[Array], alone: bool) -> list[Array]:
    """Return the metrics' state with the contributions of the replicas."""
    return [new if alone else old + new for old, new in zip(before, change, strict=True)]
