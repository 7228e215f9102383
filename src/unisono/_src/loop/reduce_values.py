"""What is made of the replicas' values outside of them: a sum, a mean, all of them behind one another, each."""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src import reduction_tree
from unisono._src.distributed.per_replica import PerReplica, is_value
from unisono._src.placement import Placement


class ReduceOp(enum.Enum):
    """How `reduce` makes one value of those of the replicas."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, op: Any) -> ReduceOp:
        name = op.name if isinstance(op, enum.Enum) else op
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        raise ValueError(f'reduce received the operation {op!r}. Write un.ReduceOp.SUM or un.ReduceOp.MEAN, or "SUM" or "MEAN".')


def by_replica(value: Any) -> dict[int, Any]:
    """The values of the replicas that have rows."""
    if isinstance(value, PerReplica):
        return value.present
    return {replica: jnp.asarray(part) for replica, part in enumerate(value.values) if len(part)}


def local_results(value: Any, replicas: int) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(value, is_leaf=is_value)
    if not any(map(is_value, leaves)):
        return (value,)
    columns = [leaf.values if is_value(leaf) else (leaf,) * replicas for leaf in leaves]
    return tuple(jax.tree.unflatten(structure, column) for column in zip(*columns, strict=True))


def reduced(op: Any, value: Any, axis: int | None, placement: Placement) -> Any:
    op = ReduceOp.of(op)
    return jax.tree.map(lambda leaf: _reduced(op, leaf, axis, placement), value, is_leaf=is_value)


def _reduced(op: ReduceOp, value: Any, axis: int | None, placement: Placement) -> Any:
    if not is_value(value):
        return of_host(op, value, placement.replicas)
    if axis is None and isinstance(value, PerReplica) and value.total is not None:
        count, total = None, value.total
    else:
        parts = {r: jax.device_put(part, placement.lead) for r, part in by_replica(value).items()}
        count, total = sums(parts, axis, placement.replicas)
    if op is ReduceOp.MEAN:
        if count is None:
            count = value.count
        return total / count
    return total if value.dtype == bool else total.astype(value.dtype)


def sums(parts: dict[int, jax.Array], axis: int | None, replicas: int) -> tuple[int, jax.Array]:
    """(how many values went into it, the sum): over replicas, in the order of the tree, and over an axis if one is given."""
    count = len(parts)
    parts = {r: part.astype(jnp.int32) if part.dtype == bool else part for r, part in parts.items()}
    if axis is not None:
        if any(not -part.ndim <= axis < part.ndim for part in parts.values()):
            rank = min(part.ndim for part in parts.values())
            raise ValueError(
                f"reduce received axis={axis} for values of rank {rank}. Write axis=None to sum over replicas alone."
            )
        count = sum(part.shape[axis] for part in parts.values())
        parts = {r: jnp.sum(wide(part), axis) for r, part in parts.items()}
    shapes = {part.shape for part in parts.values()}
    if len(shapes) > 1:
        raise ValueError(
            f"reduce received values of shapes {' and '.join(map(str, sorted(shapes)))} from the replicas, which cannot be added. Give "
            f"axis=0 to add over their rows as well, or use strategy.gather(value, axis=0)."
        )
    total = reduction_tree.total(range(replicas), lambda span: len(span) == 1, lambda span: parts.get(span.start), add)
    assert total is not None
    return count, wide(total)


def add(left: jax.Array, right: jax.Array) -> jax.Array:
    return wide(left) + wide(right)


def wide(array: jax.Array) -> jax.Array:
    """Half precision is summed in float32."""
    return array.astype(jnp.float32) if array.dtype in (jnp.float16, jnp.bfloat16) else array


def of_host(op: ReduceOp, value: Any, replicas: int) -> Any:
    """A value that is the same for every replica."""
    if op is ReduceOp.MEAN or replicas == 1 or (np.ndim(value) == 0 and value == 0):
        return value
    raise ValueError(
        f"reduce received {value!r}, one value and not one for each of {replicas} replicas: their sum would be {replicas} times it. "
        f"Reduce what strategy.run returned."
    )


def gathered(value: Any, axis: int, placement: Placement) -> Any:
    def one(leaf: Any) -> Any:
        if not is_value(leaf):
            raise ValueError(
                f"gather received {leaf!r}, one value and not one for each replica. Gather what strategy.run returned."
            )
        parts = [jax.device_put(part, placement.lead) for part in by_replica(leaf).values()]
        if not parts[0].ndim:
            raise ValueError(
                "gather received one number for each replica, and puts arrays one behind the other. Write "
                'strategy.local_results(value), or strategy.reduce("SUM", value, axis=None).'
            )
        return jnp.concatenate(parts, axis)

    return jax.tree.map(one, value, is_leaf=is_value)
