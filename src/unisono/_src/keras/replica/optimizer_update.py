"""The end of a loop's step: the optimizers run once.

They get the sums of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from unisono._src.engine.state import State
from unisono._src.keras.private.optimizers import list_optimizer_weights
from unisono._src.keras.replica.trace_recorder import NotedArrays, ReplicaCode
from unisono._src.keras.replica.used_variables import UsedVariables
from unisono._src.typing import Array, PyTree, Values


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


class GradientNotes:
    """The notes of the code since this object was made. Outside of replica code nothing is noted.

    What is noted in the trace of a gradient is handed out of it: outside, the same values are other arrays.
    """

    def __init__(self, code: ReplicaCode | None) -> None:
        self._noted: list[NotedArrays] = [] if code is None else code.noted
        self._masks: list[Array] = [] if code is None else code.masks
        self._divisors: list[float | Array] = [] if code is None else code.divisors
        self._fixed_divisors: list[tuple[float, int]] = [] if code is None else code.fixed_divisors
        self._known_notes = len(self._noted)
        self._known_masks = len(self._masks)
        self._known_divisors = len(self._divisors)
        self._known_fixed_divisors = len(self._fixed_divisors)

    @property
    def masks(self) -> list[Array]:
        return self._masks[self._known_masks :]

    @property
    def has_divided(self) -> bool:
        """Whether the code has divided a loss for the global batch."""
        return len(self._divisors) > self._known_divisors or len(self._fixed_divisors) > self._known_fixed_divisors

    def get_arrays(self) -> PyTree:
        """The arrays of the notes."""
        return [note.arrays for note in self._noted[self._known_notes :]], self._divisors[self._known_divisors :]

    def set_arrays(self, arrays: PyTree) -> None:
        """Replace the arrays that `get_arrays` returned."""
        of_notes, self._divisors[self._known_divisors :] = arrays
        notes = self._noted[self._known_notes :]
        self._noted[self._known_notes :] = [note._replace(arrays=new) for note, new in zip(notes, of_notes, strict=True)]
