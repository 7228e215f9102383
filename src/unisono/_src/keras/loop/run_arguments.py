"""The arguments of `run`.

They are arrays with a shard for each replica, arrays for all replicas, and values that the compiler knows.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import keras
import numpy as np
from jax.tree_util import KeyPath, PyTreeDef, SequenceKey

from unisono._src.engine.global_batch import BatchArray, GlobalBatch, as_global_batch
from unisono._src.function_names import get_function_name, get_parameter_name
from unisono._src.keras.checks.user_code.captures import Capture, find_captures
from unisono._src.keras.checks.user_code.staleness import VALUE_TYPES, IdentityKey, is_same_value
from unisono._src.keras.distributed.per_replica import PerReplica, Shards, is_replica_value
from unisono._src.keras.library_arrays import read_values
from unisono._src.keras.replica.refused_calls import refuse_undistributed
from unisono._src.keras.replica.replicated import Replicated, is_array, refuse_tensorflow_data
from unisono._src.placement import Placement
from unisono._src.typing import AnyArray, Keywords, PyTree, Shape, UserFunction, UserObject

NUMBER_TYPES = (bool, int, float)

INSTEAD = "Return it instead; what only the function needs, it puts into a copy: list(argument), dict(argument)."

ArrayKinds: TypeAlias = tuple[tuple[Shape, str], ...]
"""The shapes and dtypes of arrays."""


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
        """Fill in arrays: (args, kwargs)."""
        leaves = [
            arrays[leaf.kind][leaf.place] if isinstance(leaf, ArrayLeaf) else unwrap_same(leaf.value) for leaf in self.leaves
        ]
        return jax.tree.unflatten(self.structure, leaves)

    def find_captures(self, function: UserFunction) -> list[Capture]:
        """Find what a function captures. That includes what it finds in the objects among these arguments."""
        objects = [
            (describe_place(function, path), unwrap_same(leaf.value))
            for path, leaf in zip(self._list_paths(), self.leaves, strict=True)
            if isinstance(leaf, StaticLeaf) and leaf.kind not in VALUE_TYPES
        ]
        return find_captures(function, objects)

    def find_difference(self, function: UserFunction, other: ArgumentTemplate) -> tuple[str, object]:
        """Find the first static leaf that differs from another template's.

        The result is its place and value. The templates have one structure.
        """
        return next(
            (describe_place(function, path), unwrap_same(leaf.value))
            for path, leaf, their_leaf in zip(self._list_paths(), self.leaves, other.leaves, strict=True)
            if isinstance(leaf, StaticLeaf) and leaf != their_leaf
        )

    def _list_paths(self) -> list[KeyPath]:
        """List the places of the leaves."""
        paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(self.structure, range(len(self.leaves))))
        return [path for path, _ in paths]


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
    def constant_shapes(self) -> ArrayKinds:
        return tuple((array.shape, str(array.dtype)) for array in self.constants)

    def digest_numbers(self) -> int:
        """Digest the Python numbers to 31 bits. The compiler knows them, and processes compare them. 0 where there are none."""
        leaves = enumerate(self.template.leaves)
        numbers = [(place, leaf.value) for place, leaf in leaves if isinstance(leaf, StaticLeaf) and leaf.kind in NUMBER_TYPES]
        return zlib.crc32(repr(numbers).encode()) >> 1 if numbers else 0

    def find_global_batch(self, placement: Placement) -> GlobalBatch:
        """Find the global batch. Without one, it is the batch that the carried values were made of, or a row for each replica."""
        for value in [*self.rows, *self.carried]:
            if value.placement.replicas != placement.replicas:
                raise ValueError(
                    f"strategy.run received a batch of a dataset that was distributed to {value.placement.replicas} replicas, and has "
                    f"{placement.replicas}. Distribute the dataset by the strategy that runs it."
                )
        if self.rows:
            counts = {shards.shape[0] for shards in self.rows} if placement.replicas > 1 else ()
            if len(counts) > 1:
                raise ValueError(
                    f"strategy.run received arrays of {' and '.join(map(str, sorted(counts)))} rows, from different global batches. Give "
                    f"it batches of one number of rows, for example by zipping the datasets before distributing them."
                )
            batch = as_global_batch(list(self.rows), is_cut=placement.replicas > 1)
            for value in self.carried:
                if value.batch[0] != batch.rows or value.batch[2] != batch.sizes:
                    raise value.make_rows_error()
            return batch
        like = self.carried[0].like if self.carried else BatchArray(np.zeros(placement.replicas, np.uint8))
        return as_global_batch([like])


def sort_arguments(args: Iterable[UserObject], kwargs: Keywords, replicas: int) -> RunArguments:
    """Sort the arguments of `run` by what replicas get. Arrays that are not distributed are refused."""

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
    """Sort leaves into the lists that are chosen for them. None stands for a leaf that the compiler knows."""
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
    """Make a static leaf, by value or by identity. The identity is for what has no hash, such as a list or a Keras variable."""
    try:
        hash(leaf)
    except TypeError:
        return StaticLeaf(IdentityKey(leaf), IdentityKey)
    return StaticLeaf(leaf, type(leaf))


def as_constant(leaf: UserObject) -> AnyArray:
    value = leaf.value if isinstance(leaf, Replicated) else leaf
    return value if isinstance(value, jax.Array) else read_values(value)


def split_replicated(leaf: UserObject) -> PyTree:
    """Split a `Replicated` tree into `Replicated` arrays. Every other leaf stays as it is."""
    return jax.tree.map(Replicated, leaf.value) if isinstance(leaf, Replicated) else leaf


def is_argument_leaf(thing: object) -> bool:
    return is_replica_value(thing) or isinstance(thing, Replicated | keras.Variable) or is_array(thing)


class ArgumentLeaves:
    """The leaves of a function's arguments before it is called."""

    def __init__(self, function: UserFunction, arguments: tuple[tuple[UserObject, ...], Keywords]) -> None:
        self._function = function
        self._arguments = arguments
        self._leaves, self._structure = jax.tree_util.tree_flatten_with_path(arguments)

    def refuse_changes(self) -> None:
        """Refuse changes of a list or a dict among the arguments. The function got a copy, and the change would be lost."""
        name = get_function_name(self._function)
        leaves, structure = jax.tree_util.tree_flatten_with_path(self._arguments)
        if structure != self._structure:
            raise ValueError(
                f"The function {name!r} puts something into an argument, or takes something out of it, where nobody will find it when the "
                f"function is compiled. {INSTEAD}"
            )
        for (path, then), (_, now) in zip(self._leaves, leaves, strict=True):
            if not is_same_value(now, then):
                raise ValueError(
                    f"The function {name!r} puts another value into {describe_place(self._function, path)}, where nobody will find it when the "
                    f"function is compiled. {INSTEAD}"
                )


def describe_place(function: UserFunction, path: KeyPath) -> str:
    """Describe the place of a leaf as the function would write it. `path` leads through (args, kwargs)."""
    argument = path[1]
    name = get_parameter_name(function, argument.idx) if isinstance(argument, SequenceKey) else str(argument.key)
    return f"{name}{jax.tree_util.keystr(path[2:])}"
