"""What `run` takes and returns: a value for each replica."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono import tree
from unisono.data.division import Rows, places
from unisono.exchange.rows import rows_of_all
from unisono.placement import Placement, split_evenly
from unisono.replica.code import current
from unisono.step.plan import Run
from unisono.step.step import Output


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


def is_value(thing: Any) -> bool:
    """What is one leaf in a tree of arguments or results."""
    return isinstance(thing, PerReplica | Shards)


class NotOneArray:
    """Lines that take it for one array are refused."""

    __array__ = __jax_array__ = __iter__ = __float__ = __int__ = __bool__ = __getitem__ = lambda self, *_, **__: refuse(self)
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = __array__
    __matmul__ = __rmatmul__ = __mod__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __array__
    numpy = __array__
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return (
            refuse(self) if isinstance(other, int | float) or (hasattr(other, "dtype") and not is_value(other)) else self is other
        )


class Shards(NotOneArray, Rows):
    """An array of a global batch, of which each replica gets its rows."""

    placement: Placement
    begun: Callable[[], None]
    """To be called when the devices have begun with it: then there is time to see to the next batch."""

    def __init__(self, rows: Rows, placement: Placement, begun: Callable[[], None] = lambda: None) -> None:
        super().__init__(rows.array, rows.position, rows.sizes)
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "begun", begun)

    def send(self, runs: Iterable[tuple[int, Run]]) -> None:
        """To the devices that run it, by their indices, as a step will ask for it."""
        for device, run in runs:
            there = self.placement.devices[device]
            self.on(there, run.rows, (places(self.placement.replicas, there), run.size))

    @property
    def values(self) -> tuple[np.ndarray, ...]:
        """The rows of each replica, in order."""
        if self.sizes is not None:
            return tuple(np.split(self.array, np.cumsum(self.sizes)[:-1]))
        return tuple(self.array[rows.start : rows.stop] for rows in split_evenly(len(self.array), self.placement.replicas))

    def __repr__(self) -> str:
        return f"<a global batch's array of shape {self.shape} and dtype {self.dtype} for {self.placement.replicas} replicas>"


class PerReplica(NotOneArray):
    """One array of what replicas returned, on their devices."""

    def __init__(
        self,
        placement: Placement,
        like: Rows,
        outputs: Sequence[Output],
        index: int,
        total: jax.Array | None,
        is_share: bool,
        shapes: Mapping[int, jax.ShapeDtypeStruct],
    ) -> None:
        """
        Args:
            placement: Where they ran.
            like: Has the rows of the global batch that the values were made of.
            outputs: Of the replicas of this process.
            index: The array's place among the outputs.
            total: The sum over replicas, where the step has made it already.
            is_share: Whether each is a replica's share of a loss.
            shapes: By the rows of a replica; needed where replicas run in other processes.
        """
        self.placement = placement
        self.like = like
        self.is_share = is_share
        self.total = total
        self._outputs = outputs
        self._index = index
        found = {output.run.size: output.arrays[index] for output in outputs}
        self._shapes = {size: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for size, a in found.items()} | dict(shapes)

    @property
    def dtype(self) -> np.dtype:
        return next(iter(self._shapes.values())).dtype

    def shapes(self, size: int) -> jax.ShapeDtypeStruct:
        """The value of a replica with so many rows."""
        if size not in self._shapes:
            raise ValueError(f"{self!r} is of other rows than the batch that strategy.run received with it.")
        return self._shapes[size]

    def on(self, device: int, run: Run) -> jax.Array:
        """The values of neighbouring replicas, behind one another."""
        for output in self._outputs:
            if (output.device, output.run) == (device, run):
                return output.arrays[self._index]
        raise ValueError(f"{self!r} is of other rows than the batch that strategy.run received with it.")

    @property
    def present(self) -> dict[int, jax.Array]:
        """The values of the replicas that had rows, each on its device; on the lead, where several processes run them."""
        here = {
            output.run.first + number: output.arrays[self._index][number]
            for output in self._outputs
            for number in range(output.run.count)
        }
        return here if self.placement.processes is None else self._of_all(here)

    @property
    def count(self) -> int:
        """How many replicas had rows."""
        return sum(size > 0 for size in self._sizes)

    @property
    def _sizes(self) -> Sequence[int]:
        return self.like.sizes or [len(part) for part in split_evenly(self.like.shape[0], self.placement.replicas)]

    def _of_all(self, here: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """Every process asks for them at the same line."""
        shapes = {replica: self._shapes[size] for replica, size in enumerate(self._sizes) if size}
        lengths = {replica: math.prod(of.shape) for replica, of in shapes.items()}
        flat = [jnp.ravel(jax.device_put(here[replica], self.placement.lead)) for replica in sorted(here)]
        mine = jnp.concatenate(flat) if flat else jax.device_put(jnp.zeros(0, self.dtype), self.placement.lead)
        (whole,) = rows_of_all(self.placement)(
            [mine], [[sum(lengths.get(r, 0) for r in of) for of in self.placement.of_processes]]
        )
        ends = itertools.accumulate(lengths.values(), initial=0)
        return {
            replica: whole[start : start + lengths[replica]].reshape(shapes[replica].shape)
            for replica, start in zip(shapes, ends, strict=False)
        }

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The value of each replica, in order; of one without rows, no rows, or zero where the value has none."""
        present, like = self.present, next(iter(self._shapes.values()))
        by_rows = all(of.shape[:1] == (size,) for size, of in self._shapes.items())
        shape = (0, *like.shape[1:]) if by_rows else like.shape
        return tuple(present[r] if r in present else jnp.zeros(shape, like.dtype) for r in range(self.placement.replicas))

    shape = ndim = property(lambda self: refuse(self))

    def __repr__(self) -> str:
        return f"<a {self.dtype} for each of {self.placement.replicas} replicas>"


def refuse(value: Any) -> Any:
    if current() is not None:
        raise ValueError(
            f"{value!r} reaches replica code by a name, where it is the value of no replica. Give it to the function as an argument: "
            f"strategy.run(step, args=(batch,))."
        )
    raise ValueError(
        f"{value!r} has one value for each replica, and is used as one array. Outside of replica code write "
        f'strategy.reduce("SUM", value, axis=None) for their sum, strategy.gather(value, axis=0) for all of them one behind the '
        f"other, or strategy.local_results(value) for each."
    )


def check(value: Any, placement: Placement, call: str) -> None:
    """`call` is how the method of the strategy is called that gets the value."""
    for leaf in jax.tree.leaves(value, is_leaf=is_value):
        if is_value(leaf) and leaf.placement.replicas != placement.replicas:
            raise ValueError(
                f"strategy.{call} received {leaf!r}, and the strategy has {placement.replicas}. Ask the strategy that ran the replicas."
            )


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
    total = tree.total(range(replicas), lambda span: len(span) == 1, lambda span: parts.get(span.start), add)
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
