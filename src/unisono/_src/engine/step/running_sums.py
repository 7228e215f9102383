"""The sum of the reduction tree inside a compiled loop.

It is a stack of sums of 1, 2, 4, ... neighbours, the longest at the bottom. Adding a replica is counting up by one in binary:
sums of equal length are added, the left one in front, until all lengths differ. At the end the stack is added from the top down.
Both are the additions of `reduction_tree.sum_tree`, in its order. Replicas without rows are the last ones and are not counted at
all. A replica's contribution takes a slot only when nothing is left to add to it.

What is added was written outside of the loop that adds it, so that no multiplication before a sum can be fused into it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from unisono._src.engine.packing import PackedTree, pack_tree
from unisono._src.kernels.before_gradient import uses_kernels
from unisono._src.kernels.native.step_calls import SUMMED_DTYPES, call_all_reduce, call_push
from unisono._src.typed_jax import fori_loop, map_tree, take_index, update_index
from unisono._src.typing import Array, PyTree

Sums = PackedTree
"""(place, element) of each dtype. A complete sum lies at the first place."""


def count_places(replicas: int) -> int:
    """Count the slots that the stack needs. It is the largest number of set bits in the numbers up to `replicas`.

    >>> [count_places(replicas) for replicas in (1, 2, 3, 7, 8, 16)]
    [1, 1, 2, 3, 3, 4]
    """
    return (replicas + 1).bit_length() - 1


def get_place(sums: Sums, place: int | Array = 0) -> PackedTree:
    """Read the sum in a slot."""
    return map_tree(lambda places: take_index(places, place, keepdims=False), sums)


def set_place(sums: Sums, place: int | Array, value: PackedTree) -> Sums:
    """Write a value into a slot of the sums."""
    return map_tree(lambda places, new: update_index(places, new, place, 0), sums, value)


def push_value(sums: Sums, before: Array, value: PackedTree) -> Sums:
    """Add one more value after `before` others."""
    height = lax.population_count(before)
    # The trailing ones of `before`: these sums are completed by this value, as carries in binary.
    carries = lax.population_count(before & ~(before + 1))

    def carry(number: Array, right: PackedTree) -> PackedTree:
        return map_tree(jnp.add, get_place(sums, height - 1 - number), right)

    return set_place(sums, height - carries, fori_loop(0, carries, carry, value))


def push_tree(sums: Sums, before: Array, tree: PyTree) -> Sums:
    """Add one more value, a tree, after `before` others.

    A kernel does not pack its arrays first: it adds in one pass over memory.
    """
    leaves = jax.tree.leaves(tree)
    singles = [leaf for leaf in leaves if leaf.dtype == "float32"]
    if not singles or not uses_kernels():
        return push_value(sums, before, pack_tree(tree))
    others = pack_tree([leaf for leaf in leaves if leaf.dtype != "float32"])
    left = push_value({name: sums[name] for name in others}, before, others) if others else {}
    return {**sums, **left, "float32": call_push(sums["float32"], before, singles)}


def fold_sums(sums: Sums, count: Array) -> Sums:
    """Add all `count` values up, in the first slot."""
    height = lax.population_count(count)
    return fori_loop(1, height, lambda number, sums: add_to_place_below(sums, height - number), sums)


def add_to_place_below(sums: Sums, place: Array) -> Sums:
    """Add a sum to the one below it, in place: a sum by itself would take as much memory as a gradient."""
    return set_place(sums, place - 1, map_tree(jnp.add, get_place(sums, place - 1), get_place(sums, place)))


def add_over_devices(sums: Sums, group: int | Array, device: int | Array, phase: int) -> Sums:
    """Add a phase's complete sums over the devices of a group. A device alone has group 0, and keeps its own.

    Only a kernel can: XLA's collectives are other machine code than a device alone has.
    """
    if not sums or not uses_kernels() or not SUMMED_DTYPES.issuperset(sums):
        return sums
    numbers = jnp.stack([jnp.asarray(group, "int32"), jnp.asarray(device, "int32"), jnp.int32(phase)])
    return dict(zip(sums, call_all_reduce(numbers, list(sums.values())), strict=True))
