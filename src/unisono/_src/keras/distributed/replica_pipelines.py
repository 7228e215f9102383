"""Global batches that are joined from pipelines of the replicas. Each replica has one, wherever it runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence

import jax
import numpy as np

from unisono._src.engine.global_batch import BatchArray, Position, is_batch_array
from unisono._src.keras.data.row_order import RowOrder
from unisono._src.keras.data.source import ReadSource
from unisono._src.keras.distributed.batch_sources import make_source
from unisono._src.keras.replica.refused_calls import has_different_rows
from unisono._src.keras.replica.replicated import is_array
from unisono._src.typing import PyTree, UserBatch, UserObject


class PipelineSource(ReadSource):
    """Joins one batch of each replica's source to a global batch."""

    def __init__(self, sources: Sequence[ReadSource]) -> None:
        self.order = RowOrder(0)
        self._sources = sources
        self.is_stream = any(source.is_stream for source in sources)
        self.has_index = all(source.has_index for source in sources)

    @property
    def num_batches(self) -> int | None:
        counts = [source.num_batches for source in self._sources]
        return None if None in counts else max(count for count in counts if count is not None)

    def skip(self, passes: range, left: Container[int] = (), begun: bool = False) -> None:
        for source in self._sources:
            source.skip(passes, left, begun)

    @property
    def has_state(self) -> bool:
        return any(source.has_state for source in self._sources)

    def warn_before_resumes(self) -> None:
        for source in self._sources:
            source.warn_before_resumes()

    @property
    def seeds(self) -> list[int]:
        return [seed for source in self._sources for seed in source.seeds]

    @seeds.setter
    def seeds(self, seeds: list[int]) -> None:
        left = iter(seeds)
        for source in self._sources:
            source.seeds = list(itertools.islice(left, len(source.seeds)))

    @property
    def is_at_hand(self) -> bool:
        return all(source.is_at_hand for source in self._sources)

    def begin_reading(self) -> None:
        for source in self._sources:
            source.begin_reading()

    def end_reading(self) -> None:
        for source in self._sources:
            source.end_reading()

    def read(self, pass_: int, chosen: slice) -> Iterator[tuple[int, PyTree]]:
        of_replicas = itertools.zip_longest(*(source.read(pass_, chosen) for source in self._sources))
        for number, parts in zip(itertools.count(chosen.start, chosen.step), of_replicas):
            batches = [None if part is None else part[1] for part in parts]
            if not number:
                refuse_same_rows(batches)
            yield number, join_batches(batches, (pass_, number))


def join_batches(parts: Sequence[UserBatch], position: Position) -> UserBatch:
    """Join the replicas' batches to one global batch. None stands for a replica whose pipeline has ended."""
    if len(parts) == 1:
        return parts[0]
    present = [part for part in parts if part is not None]
    structures = {jax.tree.structure(part, is_leaf=is_batch_array) for part in present}
    if len(structures) > 1:
        raise ValueError(f"The replicas' pipelines give batches of different structures: {' and '.join(map(str, structures))}.")
    sizes = tuple(0 if part is None else jax.tree.leaves(part, is_leaf=is_batch_array)[0].shape[0] for part in parts)
    join = lambda *rows: BatchArray(np.concatenate([shard.array for shard in rows]), position, sizes)  # noqa: E731
    return jax.tree.map(join, *present, is_leaf=is_batch_array)


def refuse_same_rows(parts: Sequence[UserBatch]) -> None:
    """Refuse first batches that are equal on all replicas. The user's function does not look at its context then."""
    rows = [[leaf.array for leaf in jax.tree.leaves(part, is_leaf=is_batch_array)] for part in parts if part is not None]
    alike = len(rows) > 1 and all(len(other) == len(rows[0]) and all(map(np.array_equal, other, rows[0])) for other in rows[1:])
    if alike and any(has_different_rows(array) for array in rows[0]):
        raise ValueError(
            f"The function for distribute_datasets_from_function gives each of {len(parts)} replicas the same rows: every one would train "
            f"on them. Give each its own, for example dataset.shard(context.num_input_pipelines, context.input_pipeline_id) or "
            f"rows[context.input_pipeline_id :: context.num_input_pipelines]."
        )


class InputContext:
    """The replica that a pipeline is for.

    `input_pipeline_id` is its number; `num_input_pipelines` and `num_replicas_in_sync` are the number of replicas.
    """

    def __init__(self, input_pipeline_id: int, replicas: int) -> None:
        self.input_pipeline_id = input_pipeline_id
        self.num_input_pipelines = replicas
        self.num_replicas_in_sync = replicas

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Compute a replica's rows in a global batch of this size.

        Args:
            global_batch_size: A multiple of the number of replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"A global batch of {global_batch_size} rows cannot be dealt out evenly to {self.num_replicas_in_sync} replicas. Choose a "
                f"multiple, or use strategy.distribute_dataset, which takes any number."
            )
        return global_batch_size // self.num_replicas_in_sync


def make_pipelines(dataset_fn: Callable[[InputContext], UserObject], replicas: int) -> PipelineSource:
    """Make one dataset for each replica, and a source that joins them."""
    sources = []
    for replica in range(replicas):
        dataset = dataset_fn(InputContext(replica, replicas))
        if isinstance(dataset, tuple | dict) or is_array(dataset):
            raise ValueError(
                "The function for distribute_datasets_from_function returned arrays. It must return a replica's batches: a list or another "
                "iterable of them, a keras.utils.PyDataset, a grain or tf.data dataset, a torch DataLoader."
            )
        sources.append(make_source(dataset, None, False, is_cut=replicas > 1))
    return PipelineSource(sources)
