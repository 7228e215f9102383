"""What a replica hands on: a tree of arrays in which everything is a sum over replicas."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Assigned(NamedTuple):
    """What a replica's forward pass assigned."""

    moving: list[jax.Array]
    """By how much floating-point state changed, times the rows. One replica alone has the new state here."""
    counters: list[tuple[jax.Array, jax.Array, jax.Array]]
    """How much each integer or bool grew: in the first replica alone, in this one, and the square of that."""
    grown: list[jax.Array]
    """How far each random state moved on, in the first replica alone; and how far each state whose `aggregation` says so, in the
    first replica or in this one."""


class Contribution(NamedTuple):
    """One replica's part of a training or evaluation step; parts are added, in the order of the tree."""

    gradients: list[jax.Array]
    """Of the trainable variables; empty in evaluation."""
    assigned: Assigned
    metrics: list[jax.Array]
    """What the rows add to the metrics' variables. One replica alone has the new state here."""
    loss: jax.Array
    terms: jax.Array
    """The part of each loss term of compile(), without its weight."""
    logs: dict[str, jax.Array]
    """Values that an overridden `compute_metrics` returns beside the metrics, times the share of the rows."""


def add(left: Any, right: Any) -> Any:
    """The only arithmetic between replicas."""
    return jax.tree.map(jnp.add, left, right)
