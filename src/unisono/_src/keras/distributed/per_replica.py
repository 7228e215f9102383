"""Values that differ between replicas. The batches that `run` takes, and the values that it returns."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.exchange.gather_rows import get_row_gatherer
from unisono._src.engine.global_batch import BatchArray, Position, as_global_batch, count_shard_rows
from unisono._src.engine.step.plan import ReplicaRun, Runs
from unisono._src.engine.step.run_outputs import DescribeOutputs, RunOutput
from unisono._src.keras.replica.trace_recorder import get_current_code
from unisono._src.placement import Placement, split_evenly
from unisono._src.typing import Array, PyTree


def is_replica_value(thing: object) -> TypeGuard[PerReplica | Shards]:
    """Whether this value has a part for each replica. It is one leaf in a tree of arguments or results."""
    return isinstance(thing, NotOneArray)


class NotOneArray:
    """A value with a part for each replica. Its use as one array is refused."""

    __array__ = __jax_array__ = __iter__ = __float__ = __int__ = __bool__ = __getitem__ = lambda self, *_, **__: (
        refuse_as_one_array(self)
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = __array__
    __matmul__ = __rmatmul__ = __mod__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __array__
    numpy = __array__
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return (
            refuse_as_one_array(self)
            if isinstance(other, int | float) or (hasattr(other, "dtype") and not is_replica_value(other))
            else self is other
        )


class Shards(NotOneArray, BatchArray):
    """An array of a global batch, with a shard per replica."""

    placement: Placement
    report_begun: Callable[[], None]
    """To be called when the devices have begun with the batch. There is time then to read the next batch."""
    total: None = None

    def __init__(self, rows: BatchArray, placement: Placement, begun: Callable[[], None] = lambda: None) -> None:
        super().__init__(rows.source, rows.position, rows.sizes, rows.chosen)
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "report_begun", begun)

    @property
    def values(self) -> tuple[np.ndarray, ...]:
        """The rows of each replica, in the order of the replicas."""
        if self.placement.replicas == 1:
            return (self.array,)
        if self.sizes is not None:
            return tuple(np.split(self.array, np.cumsum(self.sizes)[:-1]))
        return tuple(self.array[rows.start : rows.stop] for rows in split_evenly(self.shape[0], self.placement.replicas))

    @property
    def present(self) -> Mapping[int, Array]:
        """The rows of each replica that has some, by its number."""
        return {replica: jnp.asarray(rows) for replica, rows in enumerate(self.values) if rows.shape[:1] != (0,)}

    def __repr__(self) -> str:
        return f"<a global batch's array of shape {self.shape} and dtype {self.dtype} for {self.placement.replicas} replicas>"


def read_global_arrays(value: PyTree) -> PyTree:
    """Turn a distributed batch into arrays of the global batch. Keras' methods take these."""

    def read_array(leaf: object) -> object:
        if not isinstance(leaf, Shards):
            return leaf
        if leaf.sizes is not None:
            raise ValueError(
                f"This batch comes from one pipeline a replica, of {leaf.sizes} rows, and train_on_batch would deal its rows out anew. Give "
                f"it to strategy.run, or the dataset to fit."
            )
        return leaf.array

    return jax.tree.map(read_array, value, is_leaf=is_replica_value)


@dataclasses.dataclass(eq=False, repr=False)
class PerReplica(NotOneArray):
    """One array of the replicas' results, on their devices."""

    placement: Placement
    batch: tuple[int, Position | None, tuple[int, ...] | None]
    """(rows, position, shard sizes if they are uneven) of the global batch from which the values were computed."""
    outputs: Sequence[RunOutput]
    """The outputs of the replicas of this process."""
    index: int
    """The array's index among the outputs."""
    describe: DescribeOutputs
    """Describes the outputs of a replica by the number of its rows."""
    total: jax.Array | None = None
    """The sum over replicas, if the step has computed it already."""
    is_share: bool = False
    """Whether each value is a replica's share of a loss."""

    shape = ndim = property(lambda self: refuse_as_one_array(self))

    @functools.cached_property
    def _shapes(self) -> dict[int, jax.ShapeDtypeStruct]:
        """The shape of a value, by the rows of its shard."""
        return {size: self.shapes(size) for size in sorted(set(self._sizes) - {0})}

    @property
    def dtype(self) -> np.dtype:
        return self.outputs[0].arrays[self.index].dtype if self.outputs else next(iter(self._shapes.values())).dtype

    def shapes(self, size: int) -> jax.ShapeDtypeStruct:
        """The shape of a replica's value, for a shard of `size` rows."""
        return self.describe(size)[self.index]

    def on(self, runs: Runs) -> Array:
        """Stack the values of one call's replicas, over the devices. They are in the replicas' order."""
        mesh = get_mesh(self.placement.devices)
        for output in self.outputs:
            if (output.mesh, output.runs) == (mesh, runs):
                return output.arrays[self.index]
        size = next(run.size for run in runs if run is not None)
        return mesh.put_blocks([self._stack_run(run, size) for run in runs])

    def _stack_run(self, run: ReplicaRun | None, size: int) -> np.ndarray:
        """Stack the values of a run's replicas from other calls. There is room for all replicas."""
        replicas = range(0) if run is None else range(run.first, run.first + run.count)
        own = self.own
        if not own.keys() >= set(replicas) or any(self._sizes[replica] != size for replica in replicas):
            raise self.make_rows_error()
        stacked = np.zeros((self.placement.replicas, *self._shapes[size].shape), self.dtype)
        for number, replica in enumerate(replicas):
            stacked[number] = own[replica]
        return stacked

    def make_rows_error(self) -> ValueError:
        """Make the error for values of another batch's rows."""
        return ValueError(f"{self!r} is of other rows than the batch that strategy.run received with it.")

    @property
    def present(self) -> Mapping[int, Array]:
        """The value of each replica that had rows.

        Each is on its device. If several processes run the replicas, all are on the lead device.
        """
        return self.own if self.placement.processes is None else self._gather_all(self.own)

    @property
    def own(self) -> dict[int, Array]:
        """The values of this process' replicas that had rows. They are in the replicas' order, each on its device."""
        return dict(
            sorted((item for output in self.outputs for item in output.list_values(self.index).items()), key=lambda item: item[0])
        )

    @property
    def count(self) -> int:
        """The number of replicas that had rows."""
        return sum(size > 0 for size in self._sizes)

    @property
    def like(self) -> BatchArray:
        """An array of zeros, with the rows of the values' global batch."""
        rows, position, sizes = self.batch
        return BatchArray(np.zeros(rows, np.uint8), position, sizes)

    @property
    def _sizes(self) -> Sequence[int]:
        return count_shard_rows(as_global_batch(self.like), self.placement.replicas)

    def _gather_all(self, here: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """Gather the values of all processes' replicas. Every process calls this at the same line."""
        shapes = {replica: self._shapes[size] for replica, size in enumerate(self._sizes) if size}
        lengths = {replica: math.prod(struct.shape) for replica, struct in shapes.items()}
        flat_values = [jnp.ravel(jax.device_put(here[replica], self.placement.lead)) for replica in sorted(here)]
        mine = jnp.concatenate(flat_values) if flat_values else jax.device_put(jnp.zeros(0, self.dtype), self.placement.lead)
        (whole,) = get_row_gatherer(self.placement)(
            [mine], [[sum(lengths.get(r, 0) for r in block) for block in self.placement.of_processes]]
        )
        ends = itertools.accumulate(lengths.values(), initial=0)
        return {
            replica: whole[start : start + lengths[replica]].reshape(shapes[replica].shape)
            for replica, start in zip(shapes, ends, strict=False)
        }

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The value of each replica, in order.

        A replica without rows has an empty value, or zero if values have no axis of rows.
        """
        present = self.present
        like = next(iter(self._shapes.values()))
        by_rows = all(struct.shape[:1] == (size,) for size, struct in self._shapes.items())
        shape = (0, *like.shape[1:]) if by_rows else like.shape
        return tuple(present[r] if r in present else jnp.zeros(shape, like.dtype) for r in range(self.placement.replicas))

    def __repr__(self) -> str:
        return f"<a {self.dtype} for each of {self.placement.replicas} replicas>"


def refuse_as_one_array(value: object) -> NoReturn:
    """Refuse the use of the value as one array. The message fits replica code or the code around it."""
    if get_current_code() is not None:
        raise ValueError(
            f"{value!r} reaches replica code by a name, where it is the value of no replica. Give it to the function as an argument: "
            f"strategy.run(step, args=(batch,))."
        )
    raise ValueError(
        f"{value!r} has one value for each replica, and is used as one array. Outside of replica code write "
        f'strategy.reduce("SUM", value, axis=None) for their sum, strategy.gather(value, axis=0) for all of them one behind the '
        f"other, or strategy.local_results(value) for each."
    )


def check_replica_count(value: PyTree, placement: Placement, call: str) -> None:
    """Refuse values of another number of replicas. `call` names the strategy's method in the message."""
    for leaf in jax.tree.leaves(value, is_leaf=is_replica_value):
        if is_replica_value(leaf) and leaf.placement.replicas != placement.replicas:
            raise ValueError(
                f"strategy.{call} received {leaf!r}, and the strategy has {placement.replicas}. Ask the strategy that ran the replicas."
            )
