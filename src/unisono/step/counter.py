"""The sum of the tree inside a compiled loop: a binary counter whose digit d holds the sum of 2**d neighbours.

Adding a replica is counting up by one: sums of equal length are carried, the left one in front. What stands in the counter
in the end is folded from the right. Both are the additions of `tree.total`, in its order; replicas without rows are the
last ones and are not counted at all.

Digits are written in one place of a loop and read in another, so that no multiplication before a sum can be fused into it.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unisono.flat import Flat, Parts

Counter = Flat
"""(digit, element) of each dtype."""


def digits_for(replicas: int) -> int:
    return replicas.bit_length()


def digit_of_sum(count: Any) -> Any:
    """Where the sum of `count` replicas stands when the counter is folded.

    >>> [digit_of_sum(count) for count in (1, 2, 3, 4, 6, 8)]
    [0, 1, 1, 2, 2, 3]
    """
    return count.bit_length() - 1 if isinstance(count, int) else 31 - lax.clz(count)


def get(counter: Counter, digit: Any) -> Flat:
    return jax.tree.map(lambda of: lax.dynamic_index_in_dim(of, digit, keepdims=False), counter)


def put(counter: Counter, digit: Any, value: Flat) -> Counter:
    return jax.tree.map(lambda of, new: lax.dynamic_update_index_in_dim(of, new, digit, 0), counter, value)


def put_parts(counter: Counter, digit: Any, value: Parts) -> Counter:
    """Each to its place, with no vector of them all in between."""

    def filled(of: jax.Array, parts: list[jax.Array]) -> jax.Array:
        starts = itertools.accumulate((part.size for part in parts), initial=0)
        for start, part in zip(starts, parts, strict=False):
            of = lax.dynamic_update_slice(of, part[None], (digit, jnp.int32(start)))
        return of

    return {name: filled(of, value[name]) for name, of in counter.items()}


def pushed(counter: Counter, before: Any, value: Parts) -> Counter:
    """One more value behind `before` others."""
    carries = lowest(~before)
    return lax.fori_loop(0, carries, lambda d, counter: add_to(counter, carries, d), put_parts(counter, carries, value))


def folded(counter: Counter, count: Any) -> Counter:
    """All `count` values in one digit."""

    def fold(state: Any) -> Any:
        counter, rest = state
        right, rest = lowest(rest), rest & (rest - 1)
        return add_to(counter, lowest(rest), right, left=lowest(rest)), rest

    return lax.while_loop(lambda state: lax.population_count(state[1]) > 1, fold, (counter, count))[0]


def add_to(counter: Counter, place: Any, digit: Any, left: Any = None) -> Counter:
    """Adds a digit to what stands at `place`; the digit is the left one, unless `left` says that the place is."""
    here, there = get(counter, place), get(counter, digit)
    pair = (there, here) if left is None else (here, there)
    return put(counter, place, lax.optimization_barrier(jax.tree.map(jnp.add, *pair)))


def lowest(bits: Any) -> Any:
    """The position of the lowest bit that is set."""
    return lax.population_count((bits & -bits) - 1)
