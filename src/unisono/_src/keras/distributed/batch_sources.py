"""The sources of global batches: arrays, pipelines, iterables."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Container, Iterable, Iterator, Sized

import jax
import keras

from unisono._src.engine.global_batch import is_batch_array, wrap_arrays
from unisono._src.keras.data import indexed_reading
from unisono._src.keras.data.keras_adapter import GlobalBatchAdapter, read_one_ahead
from unisono._src.keras.data.resume import NumberedBatch, resume_indexed, resume_stream
from unisono._src.keras.data.resume_point import Digest, ResumePoint, Size
from unisono._src.keras.data.row_order import RowOrder, draw_seed
from unisono._src.keras.data.torch_loaders import warn_of_global_draws
from unisono._src.keras.distributed.per_replica import is_replica_value
from unisono._src.keras.private.data_adapters import (
    ArrayDataAdapter,
    DataAdapter,
    GeneratorDataAdapter,
    PyDatasetAdapter,
    is_pipeline,
    make_adapter,
)
from unisono._src.keras.replica.replicated import is_array
from unisono._src.typing import UserBatch, UserObject


class BatchSource(DataAdapter, abc.ABC):
    """A source of global batches with their positions.

    It is read one pass at a time. Keras' loops read it as one of their adapters.
    """

    order: RowOrder
    is_stream: bool
    """Whether a batch that was read and not trained on is lost."""
    has_index: bool
    """Whether a later batch can be read without the earlier ones."""
    # No source knows what Keras asks for here. To pyright a property that is made by a call overrides none.
    batch_size = has_partial_batch = partial_batch_size = property(lambda self: None)  # pyright: ignore[reportIncompatibleMethodOverride]

    @abc.abstractmethod
    def batches(self, start: int = 0) -> Iterator[NumberedBatch]:
        """Read the batches of one pass. `start` may be later than the first batch only for a source with an index."""

    def skip(self, passes: range, left: Container[int] = (), begun: bool = False) -> None:
        """Skip these passes of a source with an index.

        `left` are passes whose end was not reached. `begun`: batches of the first one were read. By default nothing is done: a list does
        not change between passes.
        """

    @property
    def has_state(self) -> bool:
        """Whether a pass may depend on earlier passes. The order that we decide does not count."""
        return not self.has_index

    def warn_before_resumes(self) -> None:
        """Warn of a source that may give a resumed training other rows. Nothing is known of an iterable."""

    def size(self) -> Size:
        """Count the batches and rows of the current pass."""
        return {} if self.num_batches is None else {"batches": self.num_batches}

    @property
    def seeds(self) -> list[int]:
        """The seeds of the orders of rows."""
        return [self.order.seed]

    @seeds.setter
    def seeds(self, seeds: list[int]) -> None:
        (self.order.seed,) = seeds

    def from_place(self, place: ResumePoint) -> tuple[Iterator[NumberedBatch], Digest | None]:
        """Resume a pass at a resume point.

        The result has the batches from there on, and the digest of earlier batches, if they were read.
        """

        def begin(pass_: int, start: int = 0) -> Iterator[NumberedBatch]:
            self.order.passes = pass_
            return self.batches(start)

        if self.has_index:
            return resume_indexed(place, begin, self.skip, self.size), None
        return resume_stream(place, begin, self.size)

    def batches_from(self, start: int) -> Iterator[UserBatch]:
        return (batch for _, _, batch in self.batches(start))

    def get_jax_iterator(self) -> Iterator[UserBatch]:
        return self.batches_from(0)

    def get_numpy_iterator(self) -> Iterator[UserBatch]:
        return (jax.tree.map(lambda rows: rows.array, batch, is_leaf=is_batch_array) for batch in self.batches_from(0))


class AdapterSource(BatchSource):
    """A source that reads a Keras adapter."""

    def __init__(self, adapter: DataAdapter, is_cut: bool, unwrap: bool = False) -> None:
        """`is_cut`: several replicas share each batch. `unwrap`: the adapter wraps each batch in a tuple of one."""
        self._adapter = adapter
        self._is_cut = is_cut
        self._unwrap = unwrap
        self._watches_draws = False
        self.is_stream = isinstance(adapter, GeneratorDataAdapter)
        self.has_index = indexed_reading.has_index(adapter)

    @functools.cached_property
    def order(self) -> RowOrder:  # pyright: ignore[reportIncompatibleVariableOverride]  # it is not set
        """The order of the rows. Its seed is drawn when it is first needed, as in fit."""
        return RowOrder(draw_seed())

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    def batches(self, start: int = 0) -> Iterator[NumberedBatch]:
        pass_ = self.order.passes
        adapter = GlobalBatchAdapter(self._adapter, self.order, self._is_cut)
        adapter.watches_draws = self._watches_draws
        adapter.on_epoch_begin()
        for number, batch in enumerate(adapter.get_jax_iterator(start), start):
            self.order.note_pass(pass_)
            yield pass_, number, batch[0] if self._unwrap else batch
        adapter.on_epoch_end()

    def skip(self, passes: range, left: Container[int] = (), begun: bool = False) -> None:
        indexed_reading.skip_passes(self._adapter, passes, left, begun)

    @property
    def has_state(self) -> bool:
        return indexed_reading.has_state(self._adapter)

    def warn_before_resumes(self) -> None:
        self._watches_draws = True
        warn_of_global_draws(self._adapter)

    def size(self) -> Size:
        return indexed_reading.read_size(self._adapter)


class IterableSource(BatchSource):
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

    def batches(self, start: int = 0) -> Iterator[NumberedBatch]:
        pass_ = self.order.passes
        iterator = iter(self._batches)
        if (pass_ and self.is_stream) or iterator is self._iterator:
            raise ValueError(
                "This dataset was made of a generator, which was read once and cannot begin again. Distribute something that can be "
                "iterated again (a list, a class with __iter__, a keras.utils.PyDataset), or make a new one for each epoch."
            )
        self._iterator = iterator
        batches = enumerate(itertools.islice(iterator, start, None), start)
        read = (wrap_arrays(refuse_distributed_batch(batch), (pass_, number), is_cut=self._is_cut) for number, batch in batches)
        for number, batch in enumerate(read if self.is_stream else read_one_ahead(read), start):
            self.order.note_pass(pass_)
            yield pass_, number, batch


class StreamForKeras(BatchSource):
    """A stream for one call of a Keras method.

    Keras may look at the first batch to build the model: this batch then comes again.
    """

    def __init__(self, stream: BatchSource) -> None:
        self.order = stream.order
        self.is_stream = True
        self.has_index = False
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


def make_source(dataset: UserObject, batch_size: int | None, shuffle: bool, is_cut: bool) -> BatchSource:
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
        return AdapterSource(arrays, is_cut, unwrap=isinstance(dataset, tuple))
    if batch_size is not None:
        raise ValueError(
            f"distribute_dataset received batch_size={batch_size} with a {type(dataset).__name__}, which has batches of its own. Leave it "
            f"out, or give a tuple of arrays."
        )
    if isinstance(dataset, keras.utils.PyDataset):
        return AdapterSource(PyDatasetAdapter(dataset, shuffle=shuffle), is_cut)
    if shuffle:
        raise ValueError(f"distribute_dataset cannot shuffle a {type(dataset).__name__}. Shuffle where it is made.")
    if is_pipeline(dataset):
        return AdapterSource(make_adapter(dataset, None, None), is_cut)
    if not isinstance(dataset, Iterable):
        raise TypeError(
            f"distribute_dataset received a {type(dataset).__name__}. It takes a list or another iterable of global batches, a tuple or "
            f"dict of arrays with batch_size=, a keras.utils.PyDataset, a grain or tf.data dataset, or a torch DataLoader."
        )
    return IterableSource(dataset, is_cut)
