"""A data adapter around Keras' adapter.

The inner adapter reads the source, the outer one decides order and position.

Keras' loops use it like an adapter of Keras. It yields global batches on the host, read one batch ahead if the source can be
read again from its start.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TypeVar, cast

from unisono._src.engine.global_batch import as_global_batch, wrap_arrays
from unisono._src.keras.data import indexed_reading
from unisono._src.keras.data.global_draws import warn_of_draws
from unisono._src.keras.data.resume import NumberedBatch, resume_indexed, resume_stream
from unisono._src.keras.data.resume_point import Digest, ResumePoint, Size
from unisono._src.keras.data.row_order import RowOrder
from unisono._src.keras.data.torch_loaders import warn_of_forks, warn_of_global_draws
from unisono._src.keras.private.data_adapters import ArrayDataAdapter, DataAdapter, PyDatasetAdapter
from unisono._src.typing import PyTree, UserBatch

T = TypeVar("T")


class GlobalBatchAdapter(DataAdapter):
    """The global batches of a Keras adapter, with their positions. Seed, pass and batch decide their order."""

    def __init__(self, source: DataAdapter, order: RowOrder, is_cut: bool = True) -> None:
        """Wrap an adapter; `is_cut`: several replicas share each batch."""
        warn_of_forks(source)
        self.source = source
        self.order = order
        self._is_cut = is_cut
        self.watches_draws = False
        """Whether to warn when batches are drawn from a generator of the whole process."""
        self._is_pass_begun = False
        """Whether the source was told already that the pass begins. Keras says so later."""

    def get_jax_iterator(self, start: int = 0) -> Iterator[PyTree]:
        batches = (batch for _, _, batch in self._items(start))
        return batches if indexed_reading.is_stream(self.source) else read_one_ahead(batches)

    def _items(self, start: int = 0) -> Iterator[NumberedBatch]:
        pass_ = self.order.passes
        is_written = not isinstance(self.source, ArrayDataAdapter)
        batches = iter(indexed_reading.read_batches(self.source, self.order, start))
        if self.watches_draws and makes_batches_here(self.source):
            batches = warn_of_draws(batches)
        for number, batch in enumerate(batches, start):
            yield pass_, number, wrap_arrays(batch, (pass_, number), copy=is_written, is_cut=self._is_cut)

    def from_place(self, place: ResumePoint) -> tuple[Iterator[PyTree], Digest | None]:
        """Resume a pass at a resume point.

        The result has the batches from there on, and the digest of the batches before it, if they were read.
        """

        def begin(pass_: int, start: int = 0) -> Iterator[NumberedBatch]:
            self.order.passes = pass_
            return self._items(start)

        def begin_indexed(pass_: int, start: int) -> Iterator[NumberedBatch]:
            indexed_reading.find_hooks(self.source).on_epoch_begin()
            self._is_pass_begun = True
            return begin(pass_, start)

        if not self.has_index:
            items, digest = resume_stream(place, begin, self.size)
            return (batch for _, _, batch in items), digest
        items = resume_indexed(place, begin_indexed, functools.partial(indexed_reading.skip_passes, self.source), self.size)
        return read_one_ahead(batch for _, _, batch in items), None

    def warn_before_resumes(self) -> None:
        """Warn of a source that may give a resumed training other rows. Global draws are warned of when they happen."""
        self.watches_draws = True
        if isinstance(self.source, indexed_reading.IndexedAdapter):
            self.source.warn_before_resumes()
        else:
            warn_of_global_draws(self.source)

    @property
    def seeds(self) -> list[int]:
        """The seeds of the orders of rows."""
        return self.source.seeds if isinstance(self.source, indexed_reading.IndexedAdapter) else [self.order.seed]

    @seeds.setter
    def seeds(self, seeds: list[int]) -> None:
        if isinstance(self.source, indexed_reading.IndexedAdapter):
            self.source.seeds = seeds
        else:
            (self.order.seed,) = seeds

    @property
    def has_index(self) -> bool:
        """Whether a later batch can be read without the earlier ones."""
        return indexed_reading.has_index(self.source)

    @property
    def has_state(self) -> bool:
        """Whether a pass may depend on earlier passes. The order that we decide does not count."""
        return indexed_reading.has_state(self.source)

    @property
    def changes_with_epochs(self) -> bool:
        """Whether the source may change when Keras begins or ends an epoch."""
        return indexed_reading.changes_with_epochs(self.source)

    def size(self) -> Size:
        """Count the batches and rows of the current pass."""
        return indexed_reading.read_size(self.source)

    def get_numpy_iterator(self) -> Iterator[UserBatch]:
        return self.source.get_numpy_iterator()

    @property
    def num_batches(self) -> int | None:
        return self.source.num_batches

    @property
    def batch_size(self) -> int | None:
        return self.source.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return self.source.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        return self.source.partial_batch_size

    def on_epoch_begin(self) -> None:
        if not self._is_pass_begun:
            indexed_reading.find_hooks(self.source).on_epoch_begin()
        self._is_pass_begun = False

    def on_epoch_end(self) -> None:
        indexed_reading.find_hooks(self.source).on_epoch_end()


def makes_batches_here(source: DataAdapter) -> bool:
    """Whether the user's code makes each batch in this thread. It runs when the batch is asked for."""
    return isinstance(source, PyDatasetAdapter) and source.enqueuer is None


class UnsentBatchAdapter(GlobalBatchAdapter):
    """An adapter for `predict`, whose iterator is out of reach.

    Unless JAX runs on CPU, Keras sends the arrays of each batch to the first device. A `GlobalBatch` has no arrays that JAX sees.
    """

    def get_jax_iterator(self, start: int = 0) -> Iterator[PyTree]:
        return (as_global_batch(batch, self._is_cut) for batch in super().get_jax_iterator(start))


def read_one_ahead(batches: Iterator[T]) -> Iterator[T]:
    """Yield the same batches, reading one batch ahead. An error is raised after the last good batch."""
    end = object()
    ready = next(batches, end)
    while ready is not end:
        error = None
        try:
            ahead = next(batches, end)
        except Exception as raised:  # of the source; it is raised after the batch before it
            error = raised
            ahead = end
        yield cast(T, ready)
        if error is not None:
            raise error
        ready = ahead
