"""The arguments of `run`: what each replica gets a part of, what all of them get, and what is known to the compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from unisono._src.checks.user_code.identity import Same
from unisono._src.distributed.per_replica import PerReplica, Shards, is_value
from unisono._src.distributed.replicated import Replicated, check_not_tensorflows, is_array
from unisono._src.replica.refused_calls import refuse_undistributed


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
