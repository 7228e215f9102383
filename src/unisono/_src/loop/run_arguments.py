"""The arguments of `run`: arrays with a shard for each replica, arrays for all replicas, and values that the compiler knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import jax
import keras
import numpy as np
from jax.tree_util import PyTreeDef

from unisono._src.checks.user_code.staleness import IdentityKey
from unisono._src.data.global_batch import BatchArray, GlobalBatch, as_global_batch
from unisono._src.distributed.per_replica import PerReplica, Shards, is_replica_value
from unisono._src.placement import Placement
from unisono._src.replica.refused_calls import refuse_undistributed
from unisono._src.replica.replicated import Replicated, is_array, refuse_tensorflow_data
from unisono._src.typing import AnyArray, Keywords, PyTree, Shape, UserObject


class ArrayLeaf(NamedTuple):
    """A leaf that is an array in the program."""

    kind: str
    """The list that holds the array: "rows", "carried" or "constants"."""
    place: int


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
            arrays[leaf.kind][leaf.place] if isinstance(leaf, ArrayLeaf) else unwrap_same(leaf.value) for leaf in self.leaves
        ]
        return jax.tree.unflatten(self.structure, leaves)


def unwrap_same(value: Hashable) -> object:
    return value.thing if isinstance(value, IdentityKey) else value


class RunArguments(NamedTuple):
    """The arguments of one call, sorted by what replicas get of them."""

    template: ArgumentTemplate
    rows: list[Shards]
    carried: list[PerReplica]
    """Values that an earlier run returned."""
    constants: list[AnyArray]
    """Arrays that are the same for every replica."""

    @property
    def constant_shapes(self) -> tuple[tuple[Shape, str], ...]:
        return tuple((array.shape, str(array.dtype)) for array in self.constants)

    def find_global_batch(self, placement: Placement) -> GlobalBatch:
        """Return the global batch; without one, the batch that the carried values were made of, or a row for each replica."""
        for value in [*self.rows, *self.carried]:
            if value.placement.replicas != placement.replicas:
                raise ValueError(
                    f"strategy.run received a batch of a dataset that was distributed to {value.placement.replicas} replicas, and has "
                    f"{placement.replicas}. Distribute the dataset by the strategy that runs it."
                )
        if self.rows:
            counts = {shards.shape[0] for shards in self.rows}
            if len(counts) > 1:
                raise ValueError(
                    f"strategy.run received arrays of {' and '.join(map(str, sorted(counts)))} rows, from different global batches. Give "
                    f"it batches of one number of rows, for example by zipping the datasets before distributing them."
                )
            return as_global_batch(list(self.rows))
        like = self.carried[0].like if self.carried else BatchArray(np.zeros(placement.replicas, np.uint8))
        return as_global_batch([like])


def sort_arguments(args: Iterable[UserObject], kwargs: Keywords, replicas: int) -> RunArguments:
    """Return the arguments of `run` sorted by what replicas get; refuse arrays that are not distributed."""

    def choose_list(leaf: UserObject) -> str | None:
        if isinstance(leaf, Shards):
            return "rows"
        if isinstance(leaf, PerReplica):
            return "carried"
        if isinstance(leaf, Replicated):
            return "constants"
        if is_array(leaf):
            if len(leaf.shape) and replicas > 1:
                refuse_undistributed(leaf, "as an argument", replicas)
            return "constants"
        refuse_tensorflow_data(leaf, "strategy.run")
        return None

    arguments = tuple(args), dict(kwargs)
    leaves, structure = jax.tree.flatten(arguments, is_leaf=is_argument_leaf)
    if any(isinstance(leaf, Replicated) for leaf in leaves):
        arguments = jax.tree.unflatten(structure, map(split_replicated, leaves))
        leaves, structure = jax.tree.flatten(arguments, is_leaf=is_argument_leaf)
    return sort_leaves(leaves, structure, choose_list)


def sort_leaves(
    leaves: Iterable[UserObject], structure: PyTreeDef, choose_list: Callable[[UserObject], str | None]
) -> RunArguments:
    """Return the leaves sorted into the lists that are chosen for them; None stands for a leaf that the compiler knows."""
    lists: dict[str, list[UserObject]] = {"rows": [], "carried": [], "constants": []}
    template: list[ArrayLeaf | StaticLeaf] = []
    for leaf in leaves:
        kind = choose_list(leaf)
        if kind is None:
            template.append(make_static_leaf(leaf))
            continue
        template.append(ArrayLeaf(kind, len(lists[kind])))
        lists[kind].append(as_constant(leaf) if kind == "constants" else leaf)
    return RunArguments(ArgumentTemplate(structure, tuple(template)), **lists)


def make_static_leaf(leaf: UserObject) -> StaticLeaf:
    """Return the leaf by its value, or by its identity where it has no hash, as a list or a Keras variable."""
    try:
        hash(leaf)
    except TypeError:
        return StaticLeaf(IdentityKey(leaf), IdentityKey)
    return StaticLeaf(leaf, type(leaf))


def as_constant(leaf: UserObject) -> AnyArray:
    value = leaf.value if isinstance(leaf, Replicated) else leaf
    return value if isinstance(value, jax.Array) else np.asarray(value)


def split_replicated(leaf: UserObject) -> PyTree:
    """Return a `Replicated` tree as a tree of arrays that are each `Replicated`, and every other leaf as it is."""
    return jax.tree.map(Replicated, leaf.value) if isinstance(leaf, Replicated) else leaf


def is_argument_leaf(thing: object) -> bool:
    return is_replica_value(thing) or isinstance(thing, Replicated | keras.Variable) or is_array(thing)


def refuse_changed_structure(name: str, before: PyTreeDef, after: PyTreeDef) -> None:
    """Refuse a function that changes the structure of its arguments: what it puts into a list or a dict would be lost."""
    if before != after:
        raise ValueError(
            f"The function {name!r} puts something into an argument, or takes something out of it, where nobody will find it when the "
            f"function is compiled. Return it instead."
        )
