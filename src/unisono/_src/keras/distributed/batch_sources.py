"""The sources of global batches: arrays, pipelines, iterables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized

import jax
import keras

from unisono._src.engine.global_batch import wrap_arrays
from unisono._src.keras.data.keras_source import KerasSource
from unisono._src.keras.data.resume import NumberedBatch
from unisono._src.keras.data.resume_point import Size
from unisono._src.keras.data.row_order import RowOrder
from unisono._src.keras.data.source import ReadSource, Source
from unisono._src.keras.distributed.per_replica import is_replica_value
from unisono._src.keras.private.data_adapters import (
    ArrayDataAdapter,
    PyDatasetAdapter,
    is_pipeline,
    make_adapter,
)
from unisono._src.keras.replica.replicated import is_array
from unisono._src.typing import PyTree, UserBatch, UserObject


class IterableSource(ReadSource):
    """A source that reads any iterable of global batches."""

    def __init__(self, batches: Iterable[UserBatch], is_cut: bool) -> None:
        """`is_cut`: several replicas share each batch."""
        self.order = RowOrder(0)
        self._is_cut = is_cut
        self._batches = batches
        self._iterator: Iterator[UserBatch] | None = None
        """The iterator of the last pass. An iterable that gives the same one again cannot begin again."""
        self.is_stream = isinstance(batches, Iterator)
        self.has_index = isinstance(batches, list)

    @property
    def num_batches(self) -> int | None:
        return len(self._batches) if isinstance(self._batches, Sized) else None

    @property
    def is_at_hand(self) -> bool:
        return isinstance(self._batches, list)

    def read(self, pass_: int, chosen: slice) -> Iterator[tuple[int, PyTree]]:
        iterator = iter(self._batches)
        if (pass_ and self.is_stream) or iterator is self._iterator:
            raise ValueError(
                "This dataset was made of a generator, which was read once and cannot begin again. Distribute something that can be "
                "iterated again (a list, a class with __iter__, a keras.utils.PyDataset), or make a new one for each epoch."
            )
        self._iterator = iterator
        batches = itertools.islice(iterator, chosen.start, chosen.stop, chosen.step)
        for number, batch in zip(itertools.count(chosen.start, chosen.step), batches):
            yield number, wrap_arrays(refuse_distributed_batch(batch), (pass_, number), is_cut=self._is_cut)


class StreamForKeras(Source):
    """A stream for one call of a Keras method.

    Keras may look at the first batch to build the model: this batch then comes again.
    """

    def __init__(self, stream: Source) -> None:
        self.order = stream.order
        self.is_stream = True
        self.has_index = False
        self.is_shared = stream.is_shared
        self._stream = stream
        self._pass: Iterator[NumberedBatch] | None = None
        """The rest of a pass whose first batch alone was read."""
        self._first: NumberedBatch | None = None
        """That first batch."""

    @property
    def num_batches(self) -> int | None:
        return self._stream.num_batches

    @property
    def seeds(self) -> list[int]:
        return self._stream.seeds

    @seeds.setter
    def seeds(self, seeds: list[int]) -> None:
        self._stream.seeds = seeds

    def size(self) -> Size:
        return self._stream.size()

    def batches(self, start: int = 0) -> Iterator[NumberedBatch]:
        if self._pass is None:
            self._pass = self._stream.batches(start)
            self._first = next(self._pass, None)
        left = self._pass
        if self._first is not None:
            yield self._first
        self._pass = self._first = None
        yield from left


def refuse_distributed_batch(batch: UserBatch) -> UserBatch:
    """Refuse a batch that is distributed already; else pass it on."""
    if any(map(is_replica_value, jax.tree.leaves(batch, is_leaf=is_replica_value))):
        raise ValueError(
            "distribute_dataset received batches of a distributed dataset, which are distributed already. Give them to strategy.run."
        )
    return batch


def make_source(dataset: UserObject, batch_size: int | None, shuffle: bool, is_cut: bool) -> ReadSource:
    """Make the source of what `distribute_dataset` was given.

    Arguments that do not fit it are refused. `is_cut`: several replicas share each batch.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"distribute_dataset received batch_size={batch_size}. It is the rows of a global batch, 1 or more.")
    if isinstance(dataset, tuple | dict) or is_array(dataset):
        if batch_size is None:
            raise ValueError(
                f"distribute_dataset received {'an array' if is_array(dataset) else f'a {type(dataset).__name__}'} without batch_size. "
                f"Write distribute_dataset(..., batch_size=n) to cut it into global batches of n rows; a sequence of batches is a list or "
                f"another iterable."
            )
        arrays = ArrayDataAdapter(dataset, batch_size=batch_size, shuffle=shuffle)
        return KerasSource(arrays, is_cut, unwrap=isinstance(dataset, tuple))
    if batch_size is not None:
        raise ValueError(
            f"distribute_dataset received batch_size={batch_size} with a {type(dataset).__name__}, which has batches of its own. Leave it "
            f"out, or give a tuple of arrays."
        )
    if isinstance(dataset, keras.utils.PyDataset):
        return KerasSource(PyDatasetAdapter(dataset, shuffle=shuffle), is_cut)
    if shuffle:
        raise ValueError(f"distribute_dataset cannot shuffle a {type(dataset).__name__}. Shuffle where it is made.")
    if is_pipeline(dataset):
        return KerasSource(make_adapter(dataset, None, None), is_cut)
    if not isinstance(dataset, Iterable):
        raise TypeError(
            f"distribute_dataset received a {type(dataset).__name__}. It takes a list or another iterable of global batches, a tuple or "
            f"dict of arrays with batch_size=, a keras.utils.PyDataset, a grain or tf.data dataset, or a torch DataLoader."
        )
    return IterableSource(dataset, is_cut)
