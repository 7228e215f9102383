"""The end of a loop's step: the optimizers run once.

They get the sums of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from unisono._src.keras_private.optimizers import list_optimizer_weights
from unisono._src.replica.protocol import State
from unisono._src.replica.used_variables import UsedVariables
from unisono._src.typing import Array, Values


def apply_gradients(
    optimizer: keras.optimizers.Optimizer, slots: list[Array], gradients: Sequence[Array | None], weights: list[Array]
) -> tuple[list[Array], list[Array]]:
    """Compute (weights, the optimizer's state) after one update. Gradients may be missing."""
    cast_gradients = [
        None if gradient is None else gradient.astype(weight.dtype) for gradient, weight in zip(gradients, weights, strict=True)
    ]
    return optimizer.stateless_apply(slots, cast_gradients, weights)


def apply_all(variables: UsedVariables, state: State, gradients: Sequence[Array]) -> tuple[Values, Values]:
    """Compute (weights, the optimizers' state) after the updates. `gradients` come optimizer by optimizer."""
    groups = (variables.weights, state[0]), (variables.slots, state[2])
    values = {id(variable): value for group, of_group in groups for variable, value in zip(group, of_group, strict=True)}
    left = iter(gradients)
    for optimizer, positions in variables.applied_optimizers:
        weights, slots = list_optimizer_weights(optimizer), optimizer.variables
        by_position = {position: next(left) for position in positions}
        new = apply_gradients(
            optimizer,
            [values[id(slot)] for slot in slots],
            [by_position.get(position) for position in range(len(weights))],
            [values[id(weight)] for weight in weights],
        )
        for group, of_group in zip((weights, slots), new, strict=True):
            values |= {id(variable): value for variable, value in zip(group, of_group, strict=True)}
    return [values[id(weight)] for weight in variables.weights], [values[id(slot)] for slot in variables.slots]
