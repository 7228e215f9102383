"""Values of the replicas outside of replica code.

Their sum or mean is taken, or they are gathered in one array, or split by replica.
"""

from __future__ import annotations

import enum
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.engine import reduction_tree
from unisono._src.keras.distributed.per_replica import PerReplica, Shards, is_replica_value
from unisono._src.placement import Placement
from unisono._src.typing import Array, PyTree, UserObject


class ReduceOp(enum.Enum):
    """How `reduce` makes one value of the replicas' values."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, op: object) -> ReduceOp:
        """Find the operation of this name. It is a string, or a member of any enum, as of TensorFlow's."""
        name = op.name if isinstance(op, enum.Enum) else op
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        raise ValueError(f'reduce received the operation {op!r}. Write un.ReduceOp.SUM or un.ReduceOp.MEAN, or "SUM" or "MEAN".')


def split_by_replica(value: PyTree, placement: Placement) -> tuple[PyTree, ...]:
    """Split a tree into one tree for each replica, in their order.

    All are on the lead device: JAX does not compute with arrays of different devices.
    """
    leaves, structure = jax.tree.flatten(value, is_leaf=is_replica_value)
    if not any(map(is_replica_value, leaves)):
        return (value,)

    def list_parts(leaf: UserObject) -> list[UserObject]:
        if not is_replica_value(leaf):
            return [leaf] * placement.replicas
        # The rows of a batch lie on the host.
        return [jax.device_put(part, placement.lead) if isinstance(part, jax.Array) else part for part in leaf.values]

    columns = map(list_parts, leaves)
    return tuple(jax.tree.unflatten(structure, column) for column in zip(*columns, strict=True))


def reduce_over_replicas(op: object, value: PyTree, axis: int | None, placement: Placement) -> PyTree:
    """Replace each value in a tree by the replicas' sum or mean."""
    operation = ReduceOp.of(op)
    if operation is ReduceOp.MEAN and placement.replicas > 1 and has_shares(value):
        warn_of_mean_of_shares(placement.replicas)
    return jax.tree.map(lambda leaf: reduce_leaf(operation, leaf, axis, placement), value, is_leaf=is_replica_value)


def reduce_leaf(op: ReduceOp, value: UserObject, axis: int | None, placement: Placement) -> object:
    if not is_replica_value(value):
        return reduce_host_value(op, value, placement.replicas)
    if axis is None and value.total is not None:
        count = value.count if op is ReduceOp.MEAN else 1
        total = value.total
    else:
        count, total = sum_over_replicas(put_on_lead(value, placement), axis, placement.replicas)
    if op is ReduceOp.MEAN:
        return total / count
    return total.astype(value.dtype) if is_half(value.dtype) else total  # a sum of short integers may need more bits


def has_shares(value: PyTree) -> bool:
    """Whether a tree has replicas' shares of a loss in it."""
    leaves = jax.tree.leaves(value, is_leaf=is_replica_value)
    return any(isinstance(leaf, PerReplica) and leaf.is_share for leaf in leaves)


def warn_of_mean_of_shares(replicas: int) -> None:
    warnings.warn(
        f'reduce received "MEAN" for the replicas\' shares of a loss, which are divided by the rows of the global batch already: the loss is '
        f'their sum, and their mean is 1/{replicas} of it. Write strategy.reduce("SUM", value).',
        stacklevel=4,
    )


def put_on_lead(value: PerReplica | Shards, placement: Placement) -> dict[int, jax.Array]:
    """Put the values of replicas with rows on the lead device."""
    return {replica: jax.device_put(part, placement.lead) for replica, part in value.present.items()}


def sum_over_replicas(parts: dict[int, jax.Array], axis: int | None, replicas: int) -> tuple[int, jax.Array]:
    """Sum over replicas: (number of added values, sum).

    The order is that of the reduction tree. An axis may be summed as well.
    """
    count = len(parts)
    parts = {r: widen_integers(part) for r, part in parts.items()}
    if axis is not None:
        if any(not -part.ndim <= axis < part.ndim for part in parts.values()):
            rank = min(part.ndim for part in parts.values())
            raise ValueError(
                f"reduce received axis={axis} for values of rank {rank}. Write axis=None to sum over replicas alone."
            )
        count = sum(part.shape[axis] for part in parts.values())
        parts = {r: jnp.sum(widen_half(part), axis) for r, part in parts.items()}
    shapes = {part.shape for part in parts.values()}
    if len(shapes) > 1:
        raise ValueError(
            f"reduce received values of shapes {' and '.join(map(str, sorted(shapes)))} from the replicas, which cannot be added. Give "
            f"axis=0 to add over their rows as well, or use strategy.gather(value, axis=0)."
        )
    total = reduction_tree.sum_tree(range(replicas), lambda span: len(span) == 1, lambda span: parts.get(span.start), add_widened)
    assert total is not None
    return count, widen_half(total)


def add_widened(left: jax.Array, right: jax.Array) -> jax.Array:
    return widen_half(left) + widen_half(right)


def widen_integers(array: jax.Array) -> jax.Array:
    """Convert bools and short integers to the dtype of their sums. Every other array stays as it is."""
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.sum(jnp.zeros(0, array.dtype)).dtype)


def widen_half(array: jax.Array) -> jax.Array:
    """Convert half precision to float32. Every other array stays as it is."""
    return array.astype(jnp.float32) if is_half(array.dtype) else array


def is_half(dtype: np.dtype) -> bool:
    """Whether these floats are summed in another dtype."""
    return dtype in (jnp.float16, jnp.bfloat16)


def reduce_host_value(op: ReduceOp, value: UserObject, replicas: int) -> UserObject:
    """Pass on a value that is the same for every replica. Its sum over replicas is refused."""
    if op is ReduceOp.MEAN or replicas == 1 or (np.ndim(value) == 0 and value == 0):
        return value
    raise ValueError(
        f"reduce received {value!r}, one value and not one for each of {replicas} replicas: their sum would be {replicas} times it. "
        f"Reduce what strategy.run returned."
    )


def gather_replicas(value: PyTree, axis: int, placement: Placement) -> PyTree:
    """Replace each value by all replicas' values, concatenated along the axis."""

    def gather_leaf(leaf: UserObject) -> Array:
        if not is_replica_value(leaf):
            raise ValueError(
                f"gather received {leaf!r}, one value and not one for each replica. Gather what strategy.run returned."
            )
        parts = list(put_on_lead(leaf, placement).values())
        if not parts[0].ndim:
            raise ValueError(
                "gather received one number for each replica, and puts arrays one behind the other. Write "
                'strategy.local_results(value), or strategy.reduce("SUM", value, axis=None).'
            )
        return jnp.concatenate(parts, axis)

    return jax.tree.map(gather_leaf, value, is_leaf=is_replica_value)
