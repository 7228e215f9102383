"""A source that reads one of Keras' data adapters: arrays, datasets, generators. We decide order and positions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterator

from unisono._src.engine.global_batch import as_global_batch, wrap_arrays
from unisono._src.keras.data import indexed_reading
from unisono._src.keras.data.resume import NumberedBatch
from unisono._src.keras.data.resume_point import Size
from unisono._src.keras.data.row_order import RowOrder, draw_seed
from unisono._src.keras.data.source import ReadSource, Source
from unisono._src.keras.data.source_warnings import warn_of_draws, warn_of_forks, warn_of_global_draws
from unisono._src.keras.private.data_adapters import (
    ArrayDataAdapter,
    DataAdapter,
    GeneratorDataAdapter,
    PyDatasetAdapter,
    get_array_order,
)
from unisono._src.placement import Placement
from unisono._src.typing import PyTree, UserBatch


class KerasSource(ReadSource):
    """The global batches of a Keras adapter, with their positions. Seed, pass and batch decide their order.

    They are read one batch ahead, if the adapter can be read again from its start.
    """

    def __init__(self, adapter: DataAdapter, is_cut: bool, order: RowOrder | None = None, unwrap: bool = False) -> None:
        """Read an adapter.

        Args:
            is_cut: Whether several replicas share each batch.
            order: The order of the model whose `fit` reads. Keras then tells the adapter of its epochs, and training counts the passes.
                None: reading does both.
            unwrap: Whether the adapter wraps each batch in a tuple of one.
        """
        warn_of_forks(adapter)
        self._adapter = adapter
        self._is_cut = is_cut
        self._order = order
        self._unwrap = unwrap
        self._watches_draws = False
        """Whether to warn when batches are drawn from a generator of the whole process."""
        self._is_pass_begun = False
        """Whether the adapter was told already that the pass begins. Keras says so later."""
        self.is_stream = isinstance(adapter, GeneratorDataAdapter)
        self.has_index = indexed_reading.has_index(adapter)

    @functools.cached_property
    def order(self) -> RowOrder:  # pyright: ignore[reportIncompatibleVariableOverride]  # it is not set
        """The order of the rows. Its seed is drawn when it is first needed, as in fit."""
        return self._order or RowOrder(draw_seed())

    @property
    def is_at_hand(self) -> bool:
        return isinstance(self._adapter, ArrayDataAdapter)

    def read(self, pass_: int, chosen: slice) -> Iterator[tuple[int, PyTree]]:
        batches = iter(indexed_reading.read_batches(self._adapter, self.order, pass_, chosen))
        if self._watches_draws and makes_batches_here(self._adapter):
            batches = warn_of_draws(batches)
        is_written = not isinstance(self._adapter, ArrayDataAdapter)
        for number, batch in zip(itertools.count(chosen.start, chosen.step), batches):
            rows = wrap_arrays(batch, (pass_, number), copy=is_written, is_cut=self._is_cut)
            yield number, rows[0] if self._unwrap else rows

    def begin_reading(self) -> None:
        if self._order is None:
            indexed_reading.find_hooks(self._adapter).on_epoch_begin()

    def end_reading(self) -> None:
        if self._order is None:
            indexed_reading.find_hooks(self._adapter).on_epoch_end()

    def note_reading(self, pass_: int) -> None:
        if self._order is None:
            self.order.note_pass(pass_)

    def begin_pass(self) -> None:
        if self._order is not None:
            indexed_reading.find_hooks(self._adapter).on_epoch_begin()
            self._is_pass_begun = True

    def skip(self, passes: range, left: Container[int] = (), begun: bool = False) -> None:
        hooks = indexed_reading.find_hooks(self._adapter)  # a user's PyDataset may change there
        for pass_ in passes:
            if not (begun and pass_ == passes.start):
                hooks.on_epoch_begin()
            if pass_ not in left:
                hooks.on_epoch_end()

    @property
    def has_state(self) -> bool:
        return indexed_reading.changes_with_epochs(self._adapter) or not self.has_index

    @property
    def changes_with_epochs(self) -> bool:
        return self._order is not None and indexed_reading.changes_with_epochs(self._adapter)

    def warn_before_resumes(self) -> None:
        """Warn of global draws, which give a resumed training other rows. Draws of batches are warned of when they happen."""
        self._watches_draws = True
        warn_of_global_draws(self._adapter)

    def size(self) -> Size:
        adapter = self._adapter
        if isinstance(adapter, PyDatasetAdapter) and indexed_reading.changes_at_begin(adapter.py_dataset):
            return {}
        rows = get_array_order(adapter)[0] if isinstance(adapter, ArrayDataAdapter) else None
        return {what: count for what, count in (("batches", self.num_batches), ("rows", rows)) if count is not None}

    @property
    def num_batches(self) -> int | None:
        count = self._adapter.num_batches
        return None if count is None else int(count)  # a PyDataset may count by NumPy, whose integers are not of JSON

    @property
    def batch_size(self) -> int | None:
        return self._adapter.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return self._adapter.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        return self._adapter.partial_batch_size

    def on_epoch_begin(self) -> None:
        if self._order is not None and not self._is_pass_begun:
            indexed_reading.find_hooks(self._adapter).on_epoch_begin()
        self._is_pass_begun = False

    def on_epoch_end(self) -> None:
        if self._order is not None:
            indexed_reading.find_hooks(self._adapter).on_epoch_end()


def makes_batches_here(adapter: DataAdapter) -> bool:
    """Whether the user's code makes each batch in this thread. It runs when the batch is asked for."""
    return isinstance(adapter, PyDatasetAdapter) and adapter.enqueuer is None


def as_source(adapter: DataAdapter, placement: Placement, order: RowOrder, are_passes: bool = True) -> Source:
    """Make a source of what a call of `fit` reads. A distributed dataset is one.

    `are_passes`: whether each epoch is a pass. Else a dataset may change in the middle of a pass, and no batch is made long before its step.
    """
    if isinstance(adapter, Source):
        return adapter
    source = KerasSource(adapter, placement.replicas > 1, order)
    source.share(placement, in_turns=are_passes or not source.changes_with_epochs)
    return source


class UnsentBatches(Source):
    """A source for `predict`, whose iterator is out of reach.

    Unless JAX runs on CPU, Keras sends the arrays of each batch to the first device. A `GlobalBatch` has no arrays that JAX sees.
    """

    def __init__(self, source: Source, is_cut: bool) -> None:
        self.order = source.order
        self.is_stream = source.is_stream
        self.has_index = source.has_index
        self.is_shared = source.is_shared
        self._source = source
        self._is_cut = is_cut

    def batches(self, start: int = 0) -> Iterator[NumberedBatch]:
        return ((pass_, number, as_global_batch(batch, self._is_cut)) for pass_, number, batch in self._source.batches(start))

    def get_numpy_iterator(self) -> Iterator[UserBatch]:
        return self._source.get_numpy_iterator()

    @property
    def num_batches(self) -> int | None:
        return self._source.num_batches

    def on_epoch_begin(self) -> None:
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._source.on_epoch_end()
