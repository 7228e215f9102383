"""The arguments of `run`: what each replica gets a part of, what all of them get, and what is known to the compiler."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono.loop.same import Same
from unisono.loop.values import PerReplica, Shards, is_value
from unisono.near_names import says_near_names
from unisono.replica.mistakes import refuse_undistributed


@dataclasses.dataclass(frozen=True, eq=False)
class Replicated:
    """A tree of arrays that every replica is meant to get whole. One array is used like the array."""

    value: Any
    is_for_all: ClassVar[bool] = True

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self.value, *args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        """A part of a tree, or of the array."""
        return Replicated(self.value[key]) if not is_array(self.value) else self.__jax_array__()[key]

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.value, dict):
            return iter(self.value)
        return iter(self.__jax_array__()) if is_array(self.value) else map(Replicated, self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __getattr__(self, name: str) -> Any:
        """What the array has."""
        if name.startswith("__") or not is_array(self.value):
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)


def of_array(name: str) -> Any:
    return lambda self, *others: getattr(self.__jax_array__(), name)(*others)


for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    for _name in (f"__{_operator}__", f"__r{_operator}__"):
        setattr(Replicated, _name, of_array(_name))
for _operator in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Replicated, f"__{_operator}__", of_array(f"__{_operator}__"))


# A tree for JAX, so that functions which it compiles by themselves (jnp.where, jax.nn.relu) take one.
jax.tree_util.register_pytree_node(
    Replicated, lambda replicated: ((replicated.value,), None), lambda _, values: Replicated(*values)
)


@says_near_names
def replicate(value: Any) -> Any:
    """Says that every replica is meant to get the whole of `value`, an array or a tree of arrays.

    Args:
        value: For example a vector of class weights.

    Returns:
        What stands for the value: an argument of `strategy.run`, or, for one array, the array in code that finds it by its name.
    """
    return Replicated(value)


class Part(NamedTuple):
    """A leaf that is an array in the program."""

    kind: str
    """The list that holds it: "rows", "carried", "constants"."""
    index: int


class Whole(NamedTuple):
    """A leaf that the compiler knows."""

    value: Hashable
    kind: type
    """Its type: 1 and True are equal."""


@dataclasses.dataclass(frozen=True)
class Template:
    """The arguments without their arrays."""

    structure: Any
    leaves: tuple[Part | Whole, ...]

    def filled(self, **arrays: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs)"""
        leaves = [arrays[leaf.kind][leaf.index] if isinstance(leaf, Part) else bare(leaf.value) for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


class Arguments(NamedTuple):
    template: Template
    rows: list[Shards]
    carried: list[PerReplica]
    constants: list[Any]


def bare(value: Any) -> Any:
    return value.thing if isinstance(value, Same) else value


def sorted_out(args: Any, kwargs: Any, replicas: int) -> Arguments:
    lists: dict[str, list[Any]] = {"rows": [], "carried": [], "constants": []}

    def part(kind: str, value: Any) -> Part:
        lists[kind].append(value)
        return Part(kind, len(lists[kind]) - 1)

    def kept(leaf: Any) -> Part | Whole:
        if isinstance(leaf, Shards):
            return part("rows", leaf)
        if isinstance(leaf, PerReplica):
            return part("carried", leaf)
        if isinstance(leaf, Constant):
            return part("constants", leaf.value)
        if isinstance(leaf, keras.Variable):
            return Whole(Same(leaf), Same)
        if is_array(leaf):
            if len(leaf.shape) and replicas > 1:
                refuse_undistributed(leaf, "as an argument", replicas)
            return part("constants", leaf)
        check_not_tensorflows(leaf, "strategy.run")
        try:
            hash(leaf)
        except TypeError:
            return Whole(Same(leaf), Same)
        return Whole(leaf, type(leaf))

    opened = jax.tree.map(opened_up, (tuple(args), dict(kwargs)), is_leaf=is_leaf)
    leaves, structure = jax.tree.flatten(opened, is_leaf=is_leaf)
    return Arguments(Template(structure, tuple(map(kept, leaves))), **lists)


def check_arguments(name: str, before: Any, after: Any) -> None:
    """Structures of a function's arguments: what it puts into a list or a dict among them would be lost."""
    if before != after:
        raise ValueError(
            f"The function {name!r} puts something into an argument, or takes something out of it, where nobody will find it when the "
            f"function is compiled. Return it instead."
        )


@dataclasses.dataclass(frozen=True)
class Constant:
    """One array of a `Replicated` tree."""

    value: Any


def opened_up(leaf: Any) -> Any:
    return (
        jax.tree.map(lambda a: Constant(np.asarray(a) if isinstance(a, (int, float)) else a), leaf.value)
        if isinstance(leaf, Replicated)
        else leaf
    )


def is_leaf(thing: Any) -> bool:
    return is_value(thing) or isinstance(thing, Replicated | Constant | keras.Variable) or is_array(thing)


def check_not_tensorflows(thing: Any, call: str) -> None:
    """Refuse what a strategy of TensorFlow has distributed."""
    if type(thing).__module__.startswith("tensorflow.python.distribute"):
        raise TypeError(
            f"{call} received a {type(thing).__name__}, whose rows a strategy of TensorFlow has dealt out to its own replicas. Give it the "
            f"tf.data dataset itself, of global batches: model.fit(dataset), or strategy.distribute_dataset(dataset) of the strategy in whose "
            f"scope the model was made."
        )


def is_array(thing: Any) -> bool:
    """An array of whatever library."""
    return (
        hasattr(thing, "shape")
        and hasattr(thing, "dtype")
        and not isinstance(thing, keras.Variable | Replicated | type | types.ModuleType)
    )
