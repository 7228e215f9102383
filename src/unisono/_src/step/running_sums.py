"""The sum of the tree inside a compiled loop: a stack of sums of 1, 2, 4, ... neighbours, the longest at the bottom.

Adding a replica is counting up by one in binary: sums of equal length are added, the left one in front, until all lengths differ.
What stands on the stack in the end is added from the top down. Both are the additions of `tree.total`, in its order; replicas
without rows are the last ones and are not counted at all. A replica's contribution takes a place only when nothing is left to add to it.

What is added was written outside of the loop that adds it, so that no multiplication before a sum can be fused into it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unisono._src.packing import Flat

Sums = Flat
"""(place, element) of each dtype. The sum of all, when it is complete, stands at the first place."""


def places_for(replicas: int) -> int:
    """As many as any number up to this one has bits that are set.

    >>> [places_for(replicas) for replicas in (1, 2, 3, 7, 8, 16)]
    [1, 1, 2, 3, 3, 4]
    """
    return (replicas + 1).bit_length() - 1


def get(sums: Sums, place: Any = 0) -> Flat:
    return jax.tree.map(lambda of: lax.dynamic_index_in_dim(of, place, keepdims=False), sums)


def put(sums: Sums, place: Any, value: Flat) -> Sums:
    return jax.tree.map(lambda of, new: lax.dynamic_update_index_in_dim(of, new, place, 0), sums, value)


def pushed(sums: Sums, before: Any, value: Flat) -> Sums:
    """One more value behind `before` others."""
    held, carries = lax.population_count(before), lax.population_count(before & ~(before + 1))

    def carry(number: Any, right: Flat) -> Flat:
        return jax.tree.map(jnp.add, get(sums, held - 1 - number), right)

    return put(sums, held - carries, lax.fori_loop(0, carries, carry, value))


def folded(sums: Sums, count: Any) -> Sums:
    """All `count` values at the first place."""
    held = lax.population_count(count)
    return lax.fori_loop(1, held, lambda n, sums: lowered(sums, held - n), sums)


def lowered(sums: Sums, place: Any) -> Sums:
    """What stands at a place is added to what stands below."""
    return put(sums, place - 1, lax.optimization_barrier(jax.tree.map(jnp.add, get(sums, place - 1), get(sums, place))))
