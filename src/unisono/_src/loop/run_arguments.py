"""The arguments of `run`: arrays with a shard for each replica, arrays for all replicas, and values that the compiler knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import jax
import keras
import numpy as np
from jax.tree_util import PyTreeDef

from unisono._src.checks.user_code.identity import IdentityKey
from unisono._src.distributed.per_replica import PerReplica, Shards, is_replica_value
from unisono._src.distributed.replicated import Replicated, is_array, refuse_tensorflow_data
from unisono._src.replica.refused_calls import refuse_undistributed
from unisono._src.typing import Keywords, PyTree, UserObject


class ArrayLeaf(NamedTuple):
    """A leaf that is an array in the program."""

    kind: str
    """The list that holds the array: "rows", "carried" or "constants"."""
    index: int


class StaticLeaf(NamedTuple):
    """A leaf that the compiler knows."""

    value: Hashable
    kind: type
    """The type of the value: 1 and True are equal."""


@dataclasses.dataclass(frozen=True)
class ArgumentTemplate:
    """The arguments without their arrays."""

    structure: PyTreeDef
    leaves: tuple[ArrayLeaf | StaticLeaf, ...]

    def fill(self, **arrays: Sequence[UserObject]) -> tuple[tuple[UserObject, ...], Keywords]:
        """Return (args, kwargs) with these arrays in their places."""
        leaves = [
            arrays[leaf.kind][leaf.index] if isinstance(leaf, ArrayLeaf) else unwrap_same(leaf.value) for leaf in self.leaves
        ]
        return jax.tree.unflatten(self.structure, leaves)


class RunArguments(NamedTuple):
    """The arguments of one call of `run`, sorted by what replicas get of them."""

    template: ArgumentTemplate
    rows: list[Shards]
    carried: list[PerReplica]
    """Values that an earlier run returned."""
    constants: list[UserObject]
    """Arrays that are the same for every replica."""


def unwrap_same(value: Hashable) -> object:
    return value.thing if isinstance(value, IdentityKey) else value


def sort_arguments(args: Iterable[UserObject], kwargs: Keywords, replicas: int) -> RunArguments:
    """Return the arguments sorted by what replicas get; refuse arrays that are not distributed."""
    lists: dict[str, list[UserObject]] = {"rows": [], "carried": [], "constants": []}

    def add_array(kind: str, value: UserObject) -> ArrayLeaf:
        lists[kind].append(value)
        return ArrayLeaf(kind, len(lists[kind]) - 1)

    def sort_leaf(leaf: UserObject) -> ArrayLeaf | StaticLeaf:
        if isinstance(leaf, Shards):
            return add_array("rows", leaf)
        if isinstance(leaf, PerReplica):
            return add_array("carried", leaf)
        if isinstance(leaf, ReplicatedArray):
            return add_array("constants", leaf.value)
        if isinstance(leaf, keras.Variable):
            return StaticLeaf(IdentityKey(leaf), IdentityKey)
        if is_array(leaf):
            if len(leaf.shape) and replicas > 1:
                refuse_undistributed(leaf, "as an argument", replicas)
            return add_array("constants", leaf)
        refuse_tensorflow_data(leaf, "strategy.run")
        try:
            hash(leaf)
        except TypeError:
            return StaticLeaf(IdentityKey(leaf), IdentityKey)
        return StaticLeaf(leaf, type(leaf))

    opened = jax.tree.map(open_replicated, (tuple(args), dict(kwargs)), is_leaf=is_argument_leaf)
    leaves, structure = jax.tree.flatten(opened, is_leaf=is_argument_leaf)
    return RunArguments(ArgumentTemplate(structure, tuple(map(sort_leaf, leaves))), **lists)


def refuse_changed_structure(name: str, before: PyTreeDef, after: PyTreeDef) -> None:
    """Refuse a function that changes the structure of its arguments: what it puts into a list or a dict would be lost."""
    if before != after:
        raise ValueError(
            f"The function {name!r} puts something into an argument, or takes something out of it, where nobody will find it when the "
            f"function is compiled. Return it instead."
        )


@dataclasses.dataclass(frozen=True)
class ReplicatedArray:
    """One array of a `Replicated` tree."""

    value: UserObject


def open_replicated(leaf: UserObject) -> PyTree:
    """Return a `Replicated` tree as a tree of its arrays, each in a wrapper, and every other leaf as it is."""
    return (
        jax.tree.map(lambda array: ReplicatedArray(np.asarray(array) if isinstance(array, (int, float)) else array), leaf.value)
        if isinstance(leaf, Replicated)
        else leaf
    )


def is_argument_leaf(thing: object) -> bool:
    return is_replica_value(thing) or isinstance(thing, Replicated | ReplicatedArray | keras.Variable) or is_array(thing)
