"""The variables that a user function reads and assigns, by their use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import keras

from unisono._src.keras.private.optimizers import list_optimizer_weights
from unisono._src.keras.replica.trace_recorder import ReplicaCode
from unisono._src.typing import Array, Values


class UsedVariables(NamedTuple):
    """The variables that the code reads and assigns."""

    weights: list[keras.Variable]
    """Trainable variables."""
    non_trainable: list[keras.Variable]
    optimizers: list[keras.optimizers.Optimizer]
    metrics: list[keras.metrics.Metric]
    applied_optimizers: list[tuple[keras.optimizers.Optimizer, list[int]]]
    """Optimizers that are applied, and the positions of their weights that get a gradient."""
    assigned: list[int]
    """Positions in `non_trainable` of the variables that the code assigns."""
    replaced: set[int]
    """Positions of assigned variables whose old value the code does not read."""

    @property
    def trained(self) -> list[keras.Variable]:
        """The weights that optimizers update."""
        pairs = [(list_optimizer_weights(optimizer), positions) for optimizer, positions in self.applied_optimizers]
        return [weights[position] for weights, positions in pairs for position in positions]

    @property
    def frozen(self) -> list[keras.Variable]:
        """The weights that the code leaves as they are."""
        assigned = {id(self.non_trainable[position]) for position in self.assigned} | set(map(id, self.trained))
        return [weight for weight in [*self.weights, *self.non_trainable] if id(weight) not in assigned]

    @property
    def slots(self) -> list[keras.Variable]:
        return [variable for optimizer in self.optimizers for variable in optimizer.variables]

    @property
    def metric_variables(self) -> list[keras.Variable]:
        """The variables of the metrics."""
        return [variable for metric in self.metrics for variable in metric.variables]

    @property
    def all(self) -> list[list[keras.Variable]]:
        """All variables, in the groups of the state."""
        return [self.weights, self.non_trainable, self.slots, self.metric_variables]


def sort_variables(
    code: ReplicaCode, optimizers: Sequence[keras.optimizers.Optimizer], metrics: Sequence[keras.metrics.Metric]
) -> UsedVariables:
    """Sort the variables of the code by their use."""
    variables = {**code.scope.read, **code.scope.assigned}
    applied = [
        (
            update.optimizer,
            [
                position
                for position, weight in enumerate(list_optimizer_weights(update.optimizer))
                if id(weight) in update.gradients
            ],
        )
        for update in code.updates
    ]
    updated = {id(update.optimizer) for update in code.updates}
    read = [
        optimizer
        for optimizer in optimizers
        if id(optimizer) not in updated and any(id(variable) in variables for variable in optimizer.variables)
    ]
    used_optimizers = [*(update.optimizer for update in code.updates), *read]
    used_metrics = [metric for metric in metrics if any(id(variable) in variables for variable in metric.variables)]
    owned = {id(variable) for holder in [*used_optimizers, *used_metrics] for variable in holder.variables}
    weights = {id(weight): weight for optimizer, _ in applied for weight in list_optimizer_weights(optimizer)}
    weights |= {i: variable for i, variable in variables.items() if variable.trainable and i not in owned}
    others = [variable for i, variable in variables.items() if i not in owned and i not in weights]
    refuse_assigned_weights(code, weights)
    return UsedVariables(
        list(weights.values()),
        others,
        used_optimizers,
        used_metrics,
        applied,
        [position for position, variable in enumerate(others) if id(variable) in code.scope.assigned],
        {position for position, variable in enumerate(others) if id(variable) in code.scope.replaced},
    )


def refuse_assigned_weights(code: ReplicaCode, weights: dict[int, keras.Variable]) -> None:
    """Refuse code that assigns a trainable variable."""
    for i in itertools.filterfalse(lambda i: i not in weights, code.scope.assigned):
        raise ValueError(
            f"The replica's code assigns {weights[i].path!r}, a trainable variable: replicas cannot agree on its value. Trainable "
            f"state changes through optimizer.apply alone; make other state with trainable=False."
        )


class OwnVariables:
    """The variables to which replicas add, by their aggregation.

    It is "sum" or "mean". All others are what the code makes of all rows.
    """

    def __init__(self, variables: UsedVariables, is_own: Callable[[keras.Variable], bool]) -> None:
        """Find these variables. `is_own` tells whether a variable is the user's own, of no layer."""
        self._variables = variables.non_trainable
        self._replaced = variables.replaced
        self._added = [
            place
            for place in variables.assigned
            if is_own(self._variables[place]) and self._variables[place].aggregation in ("sum", "mean")
        ]
        """Their positions."""
        for place in self._added:
            check_has_sum(self._variables[place])

    def list_parts(self, before: Values, after: Values, row_fraction: Array) -> list[Array]:
        """List what a replica adds to each of them. It is the change, or the replica's part of the mean by rows."""
        parts: list[Array] = []
        for place in self._added:
            new = widen(after[place])
            is_mean = self._variables[place].aggregation == "mean"
            parts.append(new.astype(jnp.float32) * row_fraction if is_mean else new - self._find_base(place, before[place]))
        return parts

    def put_totals(self, before: Values, after: Values, totals: Sequence[Array]) -> Values:
        """Compute the values after the step.

        They follow from what the code makes of all rows, and from the sums of `list_parts`.
        """
        values = list(after)
        for place, total in zip(self._added, totals, strict=True):
            values[place] = (self._find_base(place, before[place]) + total).astype(before[place].dtype)
        return values

    @property
    def count(self) -> int:
        """The number of these variables."""
        return len(self._added)

    def _find_base(self, place: int, old: Array) -> Array:
        """The value to which replicas add. It is zero where their part is of new values alone."""
        is_sum = self._variables[place].aggregation == "sum"
        return widen(old) if is_sum and place not in self._replaced else jnp.zeros_like(widen(old))


def check_has_sum(variable: keras.Variable) -> None:
    """Refuse a sum over replicas of bools."""
    if jnp.issubdtype(variable.dtype, jnp.bool_):
        raise ValueError(
            f"The replica's code assigns {variable.path!r} of dtype bool with aggregation={variable.aggregation!r}, but bools have no sum. Make "
            f"it an integer, or write aggregation='only_first_replica'."
        )


def widen(value: Array) -> Array:
    """Convert small integers and bools to 32 bits."""
    return value.astype(jnp.int32) if not jnp.issubdtype(value.dtype, jnp.inexact) and value.dtype.itemsize < 4 else value
