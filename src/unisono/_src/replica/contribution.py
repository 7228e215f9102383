"""The contribution of a replica: a tree of arrays in which everything is a sum over replicas."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


class AssignedState(NamedTuple):
    """The state that a replica's forward pass assigned."""

    float_changes: list[jax.Array]
    """The change of floating-point state, times the rows. One replica alone has the new state here."""
    counter_changes: list[tuple[jax.Array, jax.Array, jax.Array]]
    """The growth of each integer or bool: in the first replica only, in this replica, and the square of the latter."""
    draws: list[tuple[jax.Array, jax.Array]]
    """The advance of each random state: in the first replica only, and in this replica."""
    advances: list[jax.Array]
    """The advance of each state whose `aggregation` asks for it, in the first replica or in this one."""
    is_first: list[jax.Array]
    """One for the first replica, which may have no rows, and zero for others; empty where nothing asks for it."""


class Contribution(NamedTuple):
    """One replica's part of a training or evaluation step. Contributions are added in the order of the reduction tree."""

    gradients: list[jax.Array]
    """The gradients of the trainable variables; empty in evaluation."""
    assigned: AssignedState
    metrics: list[jax.Array]
    """The changes of the metrics' variables by the rows. One replica alone whose step is a sum has the new state here."""
    loss: jax.Array
    terms: jax.Array
    """The contribution to each loss term of compile(), without the term's weight."""
    logs: dict[str, jax.Array]
    """Values that an overridden `compute_metrics` returns beside the metrics, times the row fraction."""


def add_contributions(left: T, right: T) -> T:
    """Return the sum of two trees of arrays. This is the only arithmetic between replicas."""
    return jax.tree.map(jnp.add, left, right)
